"""What carries calls out: a Plan becomes a program of the engine, on a slot of a workspace.

=========  ===================================================================
module     subject
=========  ===================================================================
invoke     the path of a call: number, look up or plan, allocate, post, run
program    a Plan as operations of an engine
workspace  what a group keeps: its engine, slots, programs and decisions
board      what ranks tell each other of their calls
courier    what hosts tell each other of them
watchdog   calls that are stuck, and their errors
ranges     names of calls and steps for profilers
=========  ===================================================================
"""
