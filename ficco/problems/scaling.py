"""Scaling of float8 operands, as data: the recipes, and the scaling of one call.

Factors dequantize: a product is ``(A * factors) @ (B * factors)``, as in ``torch._scaled_mm``. They
travel with the rows of A. Results have a wider dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ficco.problems.mask import Span

#: Families of dtypes of scaled operands. For equal bits, an e4m3fn is twice an e4m3fnuz.
FAMILIES = {
    "float8_e4m3fn": "OCP",
    "float8_e5m2": "OCP",
    "float8_e4m3fnuz": "fnuz",
}
#: Dtypes of the product of scaled operands.
RESULTS = ("bfloat16", "float16", "float32")

#: The function of a Plan that casts A to float8, and the recipes that it serves. Their factors are
#: known before all rows of a rank have been read.
CAST, CASTS = "cast", ("row", "block")

#: n and k must be multiples of this: libraries require rows of multiples of 16 bytes.
MULTIPLE = 16

#: As the number of rows or columns that share a factor: all of them.
ALL = 0


class Recipe(NamedTuple):
    """The granularity of factors.

    Attributes:
        a, b: how many rows and columns of A and of B share a factor. ``ALL`` rows of A are all
            rows of one rank.
        rows: pieces of rows begin at multiples of this, which aligns their factors to 16 bytes.
        cols: pieces of columns of A or B begin at multiples of this.
        needs: devices that no engine serves yet; empty if the recipe is served.
    """

    a: tuple[int, int]
    b: tuple[int, int]
    rows: int
    cols: int
    needs: str = ""


#: The recipes, by name. ``block`` is DeepSeek's: 1 x 128 of A by 128 x 128 of B. Factors of the
#: last three are stored in tiles of 128 rows by 4 columns, so pieces are whole tiles. nvfp4 has
#: one more factor for each matrix.
RECIPES = {
    "tensor": Recipe((ALL, ALL), (ALL, ALL), rows=1, cols=MULTIPLE),
    "row": Recipe((1, ALL), (ALL, 1), rows=4, cols=MULTIPLE),
    "block": Recipe((1, 128), (128, 128), rows=4, cols=128),
    "mxfp8": Recipe((1, 32), (32, 1), rows=128, cols=128, needs="sm_100 or gfx950"),
    "mxfp4": Recipe((1, 32), (32, 1), rows=128, cols=128, needs="sm_100 or gfx950"),
    "nvfp4": Recipe((1, 16), (16, 1), rows=128, cols=64, needs="sm_100"),
}


@dataclass(frozen=True)
class Scaling:
    """How the operands of a call are scaled, equal on all ranks.

    Attributes:
        recipe: one of :data:`RECIPES`.
        right: name of the dtype of B; A's may be another of the same family.
        out: name of the dtype of the product.
        bias: a row is added to every product, on the rank that computes it.
        fast_accum: the library may accumulate in less than float32, where it offers that.
        replicated: every rank has the factors of all rows of A, and the factors do not travel.
        source: name of the dtype of the caller's A, if the call casts A and computes its factors;
            empty: the caller's A is float8.
    """

    recipe: str
    right: str
    out: str = "bfloat16"
    bias: bool = False
    fast_accum: bool = False
    replicated: bool = False
    source: str = ""

    @property
    def rules(self) -> Recipe:
        """The parameters of the recipe."""
        return RECIPES[self.recipe]

    @property
    def by_rank(self) -> bool:
        """Whether A has one factor for all rows of a rank."""
        return self.rules.a[0] == ALL

    def __str__(self) -> str:
        flags = [name for name in ("bias", "fast_accum", "replicated") if getattr(self, name)]
        flags += [f"cast from {self.source}"] * bool(self.source)
        return " ".join([f"x {self.right} by {self.recipe}, {self.out}", *flags])


#: Dtype and scaling of kinds of operands, by the names used in commands and files. Results are
#: bfloat16.
SCALED = {
    f"{name}-{recipe}": (dtype, Scaling(recipe, dtype))
    for name, dtype in (("fp8", "float8_e4m3fn"), ("fp8fnuz", "float8_e4m3fnuz"))
    for recipe, rules in RECIPES.items()
    if not rules.needs
}


#: The same for plans and predictions of calls that cast A from bfloat16.
CAST_KINDS = {
    f"{name}-cast": (dtype, replace(scaling, source="bfloat16"))
    for name, (dtype, scaling) in SCALED.items()
    if scaling.recipe in CASTS
}


def operands_of(name: str) -> tuple[str, Scaling | None]:
    """The dtype and the scaling of a kind of operands.

    >>> operands_of("bfloat16"), operands_of("fp8-row")[0], str(operands_of("fp8-row-cast")[1])
    (('bfloat16', None), 'float8_e4m3fn', 'x float8_e4m3fn by row, bfloat16 cast from bfloat16')
    """
    return (SCALED | CAST_KINDS).get(name, (name, None))


def name_of(dtype: str, scaling: Scaling | None) -> str:
    """The name of a kind of operands in :data:`SCALED`, whoever casts A; a description otherwise.

    >>> name_of(*operands_of("fp8-row")), name_of(*operands_of("fp8-row-cast"))
    ('fp8-row', 'fp8-row')
    """
    if scaling is not None:
        scaling = replace(scaling, source="")
    named = (name for name, kind in SCALED.items() if kind == (dtype, scaling))
    return next(named, f"{dtype} {scaling}" if scaling else dtype)


def factors_of(span: Span, share: int) -> Span:
    """The factors of a span of rows or columns, if ``share`` rows or columns have one factor.

    >>> factors_of((128, 200), 128), factors_of((8, 24), 1), factors_of((8, 24), ALL)
    ((1, 2), (8, 24), (0, 1))
    """
    first, last = span
    return (0, 1) if share == ALL else (first // share, -(-last // share))


def factor_count(length: int, share: int) -> int:
    """Number of factors of ``length`` rows or columns."""
    return factors_of((0, length), share)[1]
