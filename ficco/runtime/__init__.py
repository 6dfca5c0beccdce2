"""Execution of calls: a Plan becomes a program of the engine, on a slot of a workspace.

=========  ===================================================================
module     subject
=========  ===================================================================
calls      the path of a call, a Plan as operations of an engine, and ranges for profilers
workspace  engine, slots, programs and decisions of a group
board      what ranks and hosts tell each other of their calls
watchdog   calls that are stuck, and their errors
counters   counts of calls, and blocks that refuse calls that hide nothing
=========  ===================================================================
"""
