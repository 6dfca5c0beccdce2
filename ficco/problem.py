"""What is asked: the sizes of one operator call, equal on every rank of the group."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

#: Bytes per element of the dtypes that are served.
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Problem:
    """One product over a sharded left operand.

    Attributes:
        operator: name of the public operator, for example ``"all_gather_matmul"``.
        rows: rows of A that each rank holds; its length is the number of ranks.
        n: columns of the local B.
        k: columns of A, rows of B.
        dtype: name of the dtype of A, B and the product.
        return_gathered: the gathered A is a second result.
        symmetric: A lies in symmetric memory, so that peers can read it in place.
    """

    operator: str
    rows: tuple[int, ...]
    n: int
    k: int
    dtype: str
    return_gathered: bool = False
    symmetric: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise NotImplementedError(
                f"dtype {self.dtype} is not served; use one of {', '.join(ITEMSIZE)}"
            )
        if not self.rows:
            raise ValueError("rows: required one number per rank, got none")
        for name, size in [*(("rows", r) for r in self.rows), ("n", self.n), ("k", self.k)]:
            if size < 0:
                raise ValueError(f"{name}: required a size of at least 0, got {size}")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.rows)

    @cached_property
    def m(self) -> int:
        """Rows of the gathered A."""
        return sum(self.rows)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First row of each rank's shard in the gathered A, and m at the end."""
        return (0, *accumulate(self.rows))

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype]

    @property
    def rounds(self) -> bool:
        """Whether partial sums need a wider buffer than the product's own dtype."""
        return self.itemsize < 4

    @property
    def flops(self) -> int:
        """Floating-point operations of one rank's product."""
        return 2 * self.m * self.n * self.k

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered A: what a serial all-gather allocates."""
        return self.m * self.k * self.itemsize

    def __str__(self) -> str:
        equal = len(set(self.rows)) == 1
        rows = f"{self.rows[0]} x {self.world} ranks" if equal else f"rows={list(self.rows)}"
        flags = "".join(
            f", {name}" for name in ("return_gathered", "symmetric") if getattr(self, name)
        )
        return f"{self.operator}(m={self.m} ({rows}), n={self.n}, k={self.k}, {self.dtype}{flags})"


def digest(text: str) -> int:
    """40-bit fingerprint of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=5).digest(), "little")
