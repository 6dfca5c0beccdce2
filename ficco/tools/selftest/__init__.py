"""``ficco doctor --selftest``: proves or refutes, on real ranks, what the engine here assumes.

Each check has a process group of its own, so that what one leaves behind does not reach the next.
Ranks note what they begin and how it ends in files. Where one dies, stands still or meets an error
after which it cannot be trusted, what it noted tells which check did it, and the checks that are
left run on new ranks.
"""
