"""Machines: what is known of a kind of host, as data and as files."""

from ficco.machine.files import digest, dumps, load, loads, save
from ficco.machine.find import Fingerprint, find, shipped, user_dir
from ficco.machine.model import (
    Collective,
    Contention,
    Copies,
    Curve,
    Gemm,
    Host,
    Machine,
    Memory,
    Provenance,
    Thresholds,
    Topology,
    Tuned,
    interpolate,
)

__all__ = [
    "Collective",
    "Contention",
    "Copies",
    "Curve",
    "Fingerprint",
    "Gemm",
    "Host",
    "Machine",
    "Memory",
    "Provenance",
    "Thresholds",
    "Topology",
    "Tuned",
    "digest",
    "dumps",
    "find",
    "interpolate",
    "load",
    "loads",
    "save",
    "shipped",
    "user_dir",
]
