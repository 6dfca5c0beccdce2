"""What a call asks, equal on every rank of its group: products, attention, heads, experts.

Every problem is an :class:`~ficco.problems.specification.AnyProblem`. Its specification says what
its operands and results are, what is multiplied, and which rows travel from which rank to which.
The room is pure.
"""
