"""Attention over a sequence that ranks share: its mask, its Plans and their choice, as data.

A rank's queries attend to the keys and values of all ranks as these arrive. What travels is one
matrix KV with a row for each position. Or heads are shared instead, between two all-to-alls: a rank
attends with some of them to the whole sequence. The room is pure: libraries' calls are in
``ficco.dma``, the operators in ``ficco.ops``.
"""

from ficco.attention.choose import BY_HEADS, GATHERED
from ficco.attention.gradient import AttentionGradient
from ficco.attention.heads import HeadsProblem, keys_of
from ficco.attention.heads_plans import heads_plans
from ficco.attention.mask import Documents, Mask, Rectangle, Segment, packed
from ficco.attention.plans import attention_plans
from ficco.attention.problem import MERGE, AttentionProblem

__all__ = [
    "BY_HEADS",
    "GATHERED",
    "MERGE",
    "AttentionGradient",
    "AttentionProblem",
    "HeadsProblem",
    "Mask",
    "Documents",
    "Rectangle",
    "Segment",
    "attention_plans",
    "heads_plans",
    "keys_of",
    "packed",
]
