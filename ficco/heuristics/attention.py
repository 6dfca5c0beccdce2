"""What ``auto`` compares for attention."""

from __future__ import annotations

from ficco.heuristics.family import Family
from ficco.schedules.attention import attention_plans, refusal
from ficco.schedules.heads import heads_plans

#: Attention to keys that are gathered. Growing groups are few calls of a library; the others wait
#: less for the first or after the last piece. On one H100 two lanes took 0.94 to 0.99 of the time
#: of one for growing groups, 0.89 to 0.99 for single shards
#: (docs/results/attention-replay-h100-8.csv and -4.csv).
GATHERED = Family(
    attention_plans,
    compared=(
        "growing",
        "growing:compute=2",
        "growing:tail=2,compute=2",
        "growing:pull",
        "shard-overlap",
        "shard-overlap:compute=2",
        "shard-overlap:pull",
        "hetero-fused-1d:pieces=2",
        "hetero-fused-1d:pieces=2,copy=4",
        "serial",
    ),
    default="growing",
    rings=True,
    refusal=refusal,
)

#: Attention by heads. More pieces are more calls of a library on fewer heads. On 2 H100 two groups
#: on one lane lost 3 % to serial, simulated 1 %; two groups on two lanes gained 6 %, simulated 4 %
#: (docs/results/attention-h100-2.csv).
BY_HEADS = Family(
    heads_plans,
    compared=(
        "serial",
        *(f"uniform-fused-1d:pieces={pieces}" for pieces in (2, 4, 8)),
        *(f"uniform-fused-1d:pieces={pieces},copy=4" for pieces in (2, 4, 8)),
        *(f"uniform-fused-1d:pieces={pieces},compute=2" for pieces in (2, 4)),
    ),
    default="serial",
    margin=0.025,
)
