"""Attention over a sequence that ranks share: its mask, its Plans and their choice, as data.

A rank's queries attend to the keys and values of all ranks as these arrive. What travels is one
matrix KV with a row for each position. The room is pure: libraries' calls are in ``ficco.dma``, the
operator in ``ficco.ops``.
"""

from ficco.attention.choose import AttentionChoice, choose
from ficco.attention.gradient import AttentionGradient
from ficco.attention.mask import Mask, Rectangle, Segment
from ficco.attention.plans import attention_plans
from ficco.attention.problem import MERGE, PLACEMENTS, AttentionProblem

__all__ = [
    "MERGE",
    "PLACEMENTS",
    "AttentionGradient",
    "AttentionProblem",
    "AttentionChoice",
    "Mask",
    "Rectangle",
    "Segment",
    "attention_plans",
    "choose",
]
