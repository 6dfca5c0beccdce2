"""Machines with another copy rate or latency."""

from __future__ import annotations

from dataclasses import replace

from ficco.machine import Machine


def link(machine: Machine, gb_s: float | None = None, latency_us: float | None = None) -> Machine:
    """A machine with one rate of all copies, and one latency."""
    topology, copies = machine.topology, machine.copies
    assert topology is not None and copies is not None
    if gb_s is not None:
        topology = replace(topology, bandwidth=gb_s * 1e9)
        copies = replace(copies, curve=((1.0, gb_s * 1e9),))
    if latency_us is not None:
        seconds = latency_us * 1e-6
        gap = min(copies.gap, seconds)
        copies = replace(copies, latency=seconds, gap=gap, in_front=None)
    return replace(machine, topology=topology, copies=copies)
