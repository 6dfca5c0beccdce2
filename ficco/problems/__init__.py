"""Problems: the operator and sizes of one call, equal on every rank of its group.

There are problems of products, attention, heads and experts. Each is an
:class:`~ficco.problems.specification.AnyProblem`. Its specification names the operands, the
results, the products, and the rows that travel between ranks. The room is pure.
"""
