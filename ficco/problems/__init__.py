"""What a call asks, equal on every rank of its group: products, attention, heads, experts.

A problem has a :class:`~ficco.problems.specification.Specification`: its operands and results, what
is multiplied, and which rows travel from which rank to which. The room is pure.
"""
