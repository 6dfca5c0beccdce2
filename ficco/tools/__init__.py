"""The instruments: commands, benches, tuning, the self-test and the launcher of ranks.

They import the rest of ficco, which never imports them.
"""
