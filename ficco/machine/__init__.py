"""Machines: the figures of one kind of host, as data and as files.

``fit`` needs numpy, so it is imported separately: ``from ficco.tools.tune.fits import fit``.
"""

from ficco.machine.files import digest, dumps, load, loads, save
from ficco.machine.find import Fingerprint, configs, find, known, nearest, user_dir
from ficco.machine.model import (
    COLLECTIVES,
    SCALED_PRODUCTS,
    AttentionCalls,
    Collective,
    Contention,
    Copies,
    Curve,
    Gemm,
    Host,
    Machine,
    Memory,
    Network,
    Provenance,
    Thresholds,
    Topology,
    Tuned,
    interpolate,
    tuned_key,
)

__all__ = [
    "COLLECTIVES",
    "SCALED_PRODUCTS",
    "AttentionCalls",
    "Collective",
    "Contention",
    "Copies",
    "Curve",
    "Fingerprint",
    "Gemm",
    "Host",
    "Machine",
    "Memory",
    "Network",
    "Provenance",
    "Thresholds",
    "Topology",
    "Tuned",
    "configs",
    "digest",
    "dumps",
    "find",
    "interpolate",
    "known",
    "load",
    "loads",
    "nearest",
    "save",
    "tuned_key",
    "user_dir",
]
