"""The space of schedules and the Plans it leads to.

These are the named schedules for gathering operators, as rank 0 of 4 executes them. A step takes
one tick. ``2.1`` is piece 1 of rank 2's shard, ``0.1>3`` the copy of piece 1 of rank 0 to rank 3,
``own`` the rank's own shard.

>>> from ficco.plan import render
>>> from ficco.problem import Problem
>>> def show(name, operator="all_gather_matmul"):
...     problem = Problem(operator, (64,) * 4, n=32, k=64, dtype="bfloat16")
...     lines = render(plan(problem, Schedule.parse(name), rank=0), width=96).splitlines()
...     for line in lines[2:]:
...         print(line)

All shards first, then one product. Nothing overlaps: the baseline.

>>> show("serial")
compute0 | a>staging |       |       |       | 0.0 1.0 2.0 3.0
copy0    | acquire   | 0.0>1 | 0.0>2 | 0.0>3
sync     |           |       |       |       |                 | retire

Whole shards, peer after peer, each multiplied as it arrives: PyTorch's Async TP.

>>> show("shard-overlap")
compute0 | own     |       | 1.0   | 2.0   | 3.0
copy0    | acquire | 0.0>1 | 0.0>2 | 0.0>3
sync     |         |       |       |       |     | retire

Peers in hypercube order: 1, then 2, then 4 shards are contiguous rows, so that log2(W) + 1
products suffice. Best if products take longer than copies.

>>> show("growing")
compute0 | own     |       | 1.0   |       | 2.0 3.0
copy0    | acquire | 0.0>1 | 0.0>2 | 0.0>3
sync     |         |       |       |       |         | retire

The reverse: the product after the last copy is the smallest.

>>> show("shrinking")
compute0 | own     |       |       | 2.0 3.0 | 1.0
copy0    | acquire | 0.0>2 | 0.0>3 | 0.0>1
sync     |         |       |       |         |     | retire

A piece of every rank, its own among them, makes one product of equal size in every step (FiCCO,
section V-B: little decomposition loss, most contention).

>>> show("uniform-fused-1d")
compute0 | a>staging |       |       |       | .. | a>staging |       | 0.3 1.3 2.3 3.3
copy0    | acquire   | 0.0>1 | 0.0>2 | 0.0>3 | .. | 0.3>2     | 0.3>3
sync     |           |       |       |       | .. |           |       |                 | retire

The same with pieces of columns, whose products add up in ``sum`` (FiCCO's choice for m <= k).

>>> show("uniform-fused-2d")
compute0 | a>staging |       |       |       | .. |       | 0.3 1.3 2.3 3.3 | sum>out
copy0    | acquire   | 0.0>1 | 0.0>2 | 0.0>3 | .. | 0.3>3
sync     |           |       |       |       | .. |       |                 |         | retire

A product for every piece; the rank's own pieces take turns with those of its peers.

>>> show("uniform-unfused-1d")
compute0 | 0.0     |       | 1.0   | 2.0   | 3.0   | 0.1   | .. | 0.3 | 1.3 | 2.3 | 3.3
copy0    | acquire | 0.0>1 | 0.0>2 | 0.0>3 | 0.1>1 | 0.1>2 | ..
sync     |         |       |       |       |       |       | .. |     |     |     |     | retire

The same with pieces of columns.

>>> show("uniform-unfused-2d")
compute0 | 0.0     |       | 1.0   | 2.0   | 3.0   | .. | 2.3 | sum>out | 3.3 | sum>out
copy0    | acquire | 0.0>1 | 0.0>2 | 0.0>3 | 0.1>1 | ..
sync     |         |       |       |       |       | .. |     |         |     |         | retire

The own shard first, while the first pieces travel; then a piece of every peer at a time (FiCCO,
section V-B: the middle course).

>>> show("hetero-fused-1d")
compute0 | own     |       |       |       | .. |       |       | 1.3 2.3 3.3
copy0    | acquire | 0.0>1 | 0.0>2 | 0.0>3 | .. | 0.3>2 | 0.3>3
sync     |         |       |       |       | .. |       |       |             | retire

The same with pieces of columns.

>>> show("hetero-fused-2d")
compute0 | own     |       |       |       | .. |       | 1.3 2.3 3.3 | sum>out
copy0    | acquire | 0.0>1 | 0.0>2 | 0.0>3 | .. | 0.3>3
sync     |         |       |       |       | .. |       |             |         | retire

The own shard first, then a product for every piece (FiCCO, section V-B: most decomposition loss,
least contention).

>>> show("hetero-unfused-1d")
compute0 | own     |       | 1.0   | 2.0   | 3.0   | .. | 3.2   | 1.3   | 2.3   | 3.3
copy0    | acquire | 0.0>1 | 0.0>2 | 0.0>3 | 0.1>1 | .. | 0.3>1 | 0.3>2 | 0.3>3
sync     |         |       |       |       |       | .. |       |       |       |     | retire

The same with pieces of columns.

>>> show("hetero-unfused-2d")
compute0 | own     |       | 1.0   | 2.0   | 3.0   | .. | 2.3 | sum>out | 3.3 | sum>out
copy0    | acquire | 0.0>1 | 0.0>2 | 0.0>3 | 0.1>1 | ..
sync     |         |       |       |       |       | .. |     |         |     |         | retire

One product, whose rows each wait for their piece. It is enqueued after all copies; the rows that it
multiplies meanwhile are shown one after the other.

>>> show("tiled:pieces=2")
compute0 | all 0:64 |       | all 64:96 | all 96:128 | .. | all 192:224 | all 224:256
copy0    | acquire  | 0.0>1 | 0.1>1     | 0.0>2      | .. | 0.1>3
sync     |          |       |           |            | .. |             |             | retire

The same names if A is transposed: every product adds to the whole result, and contiguous rows are
one product. Pieces of columns make rows of the result.

>>> show("growing", "all_gather_transposed_matmul")
compute0 | own     |       | 1.0   |       | 2.0 3.0 | sum>out
copy0    | acquire | 0.0>1 | 0.0>2 | 0.0>3
sync     |         |       |       |       |         |         | retire

The same names for scattering operators. ``2.1`` is piece 1 of the product's block for rank 2,
``2.1>2`` its copy to rank 2, ``sum 0`` the sum of all ranks' products for the first own piece.

One product, then all its blocks, then the sum.

>>> show("serial", "matmul_reduce_scatter")
compute0 | 1.0 2.0 3.0 0.0
copy0    | acquire         | 1.0>1 | 2.0>2 | 3.0>3
reduce0  |                 |       |       |       | sum 0
sync     |                 |       |       |       |       | retire

The blocks of the peers first; the own block is multiplied while they travel.

>>> show("shard-overlap", "matmul_reduce_scatter")
compute0 | 1.0     | 2.0   | 3.0   | 0.0
copy0    | acquire | 1.0>1 | 2.0>2 | 3.0>3
reduce0  |         |       |       |       | sum 0
sync     |         |       |       |       |       | retire

>>> show("hetero-fused-1d:pieces=2", "matmul_reduce_scatter")
compute0 | 1.0 2.0 3.0 | 1.1 2.1 3.1 | 0.0
copy0    | acquire     | 1.0>1       | 2.0>2 | 3.0>3 | 1.1>1 | 2.1>2 | 3.1>3
reduce0  |             |             |       |       |       |       |       | sum 0
sync     |             |             |       |       |       |       |       |       | retire

One product, whose blocks leave as soon as their last row is multiplied.

>>> show("tiled", "matmul_reduce_scatter")
compute0 | all 64:128 | all 128:192 | all 192:256 | all 0:64
copy0    | acquire    | 1.0>1       | 2.0>2       | 3.0>3
reduce0  |            |             |             |          | sum 0
sync     |            |             |             |          |       | retire

With ``beta``, the GEMM of the own product adds to the sum of all others.

>>> show("shard-overlap:beta", "matmul_reduce_scatter")
compute0 | 1.0     | 2.0   | 3.0   |       |       | 0.0
copy0    | acquire | 1.0>1 | 2.0>2 | 3.0>3
reduce0  |         |       |       |       | sum 0
sync     |         |       |       |       |       |     | retire

For operators that sum only: each block goes round the ranks, and every rank adds its product to it.

>>> show("ring", "matmul_reduce_scatter")
compute0 | 3.0     | 3.1   | 2.0   | 2.1   | 1.0   | 1.1   | 0.0   | 0.1
copy0    | acquire | 3.0>1 | 3.1>1 | 2.0>1 | 2.1>1 | 1.0>1 | 1.1>1
sync     |         |       |       |       |       |       |       |     | retire

An all-reduce sends its sums back to all.

>>> show("shard-overlap", "matmul_all_reduce")
compute0 | 1.0     | 2.0   | 3.0   | 0.0   | ..
copy0    | acquire | 1.0>1 | 2.0>2 | 3.0>3 | .. | sum 0>3
reduce0  |         |       |       |       | .. | staging>out | staging>out
sync     |         |       |       |       | .. |             |             | retire

Nothing is copied: each rank reads its peers' products in place and sums them itself. In an
all-reduce each rank makes the whole sum.

>>> show("one-shot", "matmul_all_reduce")
compute0 | piece 0 | acquire, tell 0 | sum 0
sync     |         |                 |       | has read | retire

>>> show("one-shot:pieces=2", "matmul_all_reduce")
compute0 | piece 0 | acquire, tell 0 | piece 1 | tell 1
reduce0  |         |                 | sum 0   | sum 1
sync     |         |                 |         |        | has read | retire
"""

from ficco.schedules.build import plan, plans, refusal, same_plans
from ficco.schedules.gather import StagingTooSmall
from ficco.schedules.groups import GRANULE
from ficco.schedules.space import KNOBS, NAMED, Schedule

__all__ = [
    "GRANULE",
    "KNOBS",
    "NAMED",
    "Schedule",
    "StagingTooSmall",
    "plan",
    "plans",
    "refusal",
    "same_plans",
]
