"""How float8 operands are scaled, as data: the recipes, and what a call asks for.

Factors dequantize: a product is ``(A * factors) @ (B * factors)``, as in ``torch._scaled_mm``. They
travel with the rows of A; results are of a wider dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

#: Dtypes of scaled operands, by family. An e4m3fn and an e4m3fnuz of the same bits differ by two.
FAMILIES = {
    "float8_e4m3fn": "OCP",
    "float8_e5m2": "OCP",
    "float8_e4m3fnuz": "fnuz",
}
#: Dtypes of the product of scaled operands.
RESULTS = ("bfloat16", "float16", "float32")

#: The function of a Plan by which A is cast to float8, and the recipes that it serves, whose
#: factors are known before all rows of a rank have been read.
CAST, CASTS = "cast", ("row", "block")

#: n and k are multiples of this: 16 bytes of a row, as the libraries ask for.
MULTIPLE = 16

#: A number of rows or columns that share a factor: all.
ALL = 0

#: First and last row or column, exclusive.
Span = tuple[int, int]


class Recipe(NamedTuple):
    """How fine factors are.

    Attributes:
        a, b: how many rows and columns of A and of B share a factor. ``ALL`` rows of A are those
            that one rank has.
        rows: pieces of rows begin at multiples of this, so that their factors do at 16 bytes.
        cols: pieces of columns of A or B begin at multiples of this.
        needs: devices that no engine has yet; empty if the recipe is served.
    """

    a: tuple[int, int]
    b: tuple[int, int]
    rows: int
    cols: int
    needs: str = ""


#: The recipes, by name. ``block`` is DeepSeek's: 1 x 128 of A by 128 x 128 of B. Factors of the
#: last three lie in tiles of 128 rows by 4 columns, so that pieces are whole tiles; nvfp4 has one
#: further factor for each matrix.
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
        bias: a row is added to every product, on the rank that makes it.
        fast_accum: the library may add up in less than float32, where it offers that.
        replicated: every rank has the factors of all rows of A, which do not travel.
        source: name of the dtype in which the caller has A, where the call itself casts it and
            makes its factors; empty: the caller has A in float8.
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
        """What its recipe is made of."""
        return RECIPES[self.recipe]

    @property
    def by_rank(self) -> bool:
        """Whether A has one factor for all rows of a rank."""
        return self.rules.a[0] == ALL

    def __str__(self) -> str:
        flags = [name for name in ("bias", "fast_accum", "replicated") if getattr(self, name)]
        flags += [f"cast from {self.source}"] * bool(self.source)
        return " ".join([f"x {self.right} by {self.recipe}, {self.out}", *flags])


#: Kinds of operands by the names that commands and files have for them: their dtype and how they
#: are scaled. Results are bfloat16.
SCALED = {
    f"{name}-{recipe}": (dtype, Scaling(recipe, dtype))
    for name, dtype in (("fp8", "float8_e4m3fn"), ("fp8fnuz", "float8_e4m3fnuz"))
    for recipe, rules in RECIPES.items()
    if not rules.needs
}


#: The same for plans and predictions of calls that cast A themselves, from bfloat16.
CAST_KINDS = {
    f"{name}-cast": (dtype, replace(scaling, source="bfloat16"))
    for name, (dtype, scaling) in SCALED.items()
    if scaling.recipe in CASTS
}


def operands_of(name: str) -> tuple[str, Scaling | None]:
    """The dtype of a kind of operands, and how they are scaled.

    >>> operands_of("bfloat16"), operands_of("fp8-row")[0], str(operands_of("fp8-row-cast")[1])
    (('bfloat16', None), 'float8_e4m3fn', 'x float8_e4m3fn by row, bfloat16 cast from bfloat16')
    """
    return (SCALED | CAST_KINDS).get(name, (name, None))


def name_of(dtype: str, scaling: Scaling | None) -> str:
    """The name of a kind of operands: of :data:`SCALED`, whoever casts A, or else in words.

    >>> name_of(*operands_of("fp8-row")), name_of(*operands_of("fp8-row-cast"))
    ('fp8-row', 'fp8-row')
    """
    if scaling is not None:
        scaling = replace(scaling, source="")
    named = (name for name, kind in SCALED.items() if kind == (dtype, scaling))
    return next(named, f"{dtype} {scaling}" if scaling else dtype)


def factors_of(span: Span, share: int) -> Span:
    """The factors of some rows or columns, of which so many share one.

    >>> factors_of((128, 200), 128), factors_of((8, 24), 1), factors_of((8, 24), ALL)
    ((1, 2), (8, 24), (0, 1))
    """
    first, last = span
    return (0, 1) if share == ALL else (first // share, -(-last // share))


def factor_count(length: int, share: int) -> int:
    """How many factors so many rows or columns have."""
    return factors_of((0, length), share)[1]
