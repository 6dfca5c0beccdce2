"""``ficco doctor --selftest``: test the assumptions of this host's engine on real ranks.

Each check has a new process group, so that leftovers do not reach the next check. Ranks write the
start and the outcome of each check to a journal. If a rank dies, hangs or raises an unexpected
error, the journal names the check, and the remaining checks run on new ranks.
"""
