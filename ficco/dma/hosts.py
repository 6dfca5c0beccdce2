"""Which ranks of a group share a host."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch.distributed import PrefixStore, ProcessGroup, Store

from ficco.dma.host import (
    absentees,
    first_call,
    meet,
    require_shareable,
    store_of,
    whereabouts,
)
from ficco.errors import MEETING, SignalTimeout

#: The variable that names the host of a rank, for containers of one host that share nothing.
VARIABLE = "FICCO_HOST"


@dataclass(frozen=True)
class Near:
    """The ranks of a host, numbered from 0, with a store of their own."""

    store: Store
    place: int
    count: int

    def rank(self) -> int:
        return self.place

    def size(self) -> int:
        return self.count


@dataclass(frozen=True)
class Hosts:
    """The hosts of a group. Those of one host follow each other, and are as many on each.

    Attributes:
        group: all ranks.
        names: of each rank's host.
        near: the ranks of this rank's host.
        session: differs from that of any group that had the same store before.
    """

    group: ProcessGroup
    names: tuple[str, ...] = ()
    near: Any = None
    session: str = ""

    @classmethod
    def one(cls, group: ProcessGroup) -> Hosts:
        """All ranks of a group on one host."""
        return cls(group, ("",) * group.size(), group)

    @property
    def count(self) -> int:
        """How many hosts there are."""
        return len(set(self.names))

    @property
    def first(self) -> int:
        """The first rank of this rank's host."""
        rank: int = self.group.rank() - self.near.rank()
        return rank

    @property
    def here(self) -> range:
        """The ranks of this rank's host."""
        return range(self.first, self.first + self.near.size())

    @property
    def far(self) -> list[int]:
        """The ranks of other hosts."""
        return [rank for rank in range(len(self.names)) if rank not in self.here]

    @property
    def rail(self) -> list[int]:
        """The ranks that have this rank's place on the other hosts."""
        each = self.near.size()
        ranks = range(self.near.rank(), len(self.names), each)
        return [rank for rank in ranks if rank not in self.here]

    def spread(self, near: list[Any], absent: Any) -> list[Any]:
        """What each rank of this host has, by rank of the group; ``absent`` for all others."""
        rest = len(self.names) - self.first - len(near)
        return [absent] * self.first + near + [absent] * rest

    def named(self, rank: int | None) -> str:
        """The host of a rank, for errors; empty where there is one only."""
        return "" if rank is None or self.count == 1 else self.names[rank]

    def store(self, purpose: str) -> Store:
        """A connection of its own to the group's store, for one life of the group there."""
        own: Any = store_of(self.group)
        if hasattr(own, "clone"):  # not in every release: threads then take turns
            own = own.clone()
        return PrefixStore(f"ficco/{purpose}/{self.session}", own)


def hosts_of(group: ProcessGroup, timeout_s: float, operator: str) -> Hosts:
    """Find out which ranks share a host, by the boot that each sees, or by the variable
    ``FICCO_HOST``. Collective.

    Raises:
        NotImplementedError: the ranks of a host do not follow each other, or cannot share memory,
            or hosts have different numbers of them.
        SignalTimeout: a rank did not say where it is.
    """

    def absent(ranks: list[int] | None, seconds: float) -> SignalTimeout:
        return SignalTimeout(
            operator=operator,
            rank=group.rank(),
            peer=ranks[0] if ranks else None,
            step=f"{first_call('find out which ranks share a host')}{absentees(ranks)}",
            schedule=MEETING,
            seconds=seconds,
        )

    mine = {**whereabouts(), "named": os.environ.get(VARIABLE, "")}
    facts = meet(group, mine, "hosts", timeout_s, absent, lambda: None)
    by_boot: dict[str, str] = {}
    for fact in facts:  # hosts may share a name
        taken = [boot for boot, name in by_boot.items() if name == fact["host"]]
        new = fact["host"] if not taken else f"{fact['host']} ({len(taken) + 1})"
        by_boot.setdefault(fact["boot"], new)
    names = tuple(fact["named"] or by_boot[fact["boot"]] for fact in facts)
    for name in dict.fromkeys(names):  # all ranks learn of any host that cannot be served
        require_shareable({rank: facts[rank] for rank, its in enumerate(names) if its == name})
    if len(set(names)) == 1:
        return Hosts.one(group)
    sizes = [(name, len(list(some))) for name, some in groupby(names)]
    if len(sizes) > len(set(names)) or len({size for _, size in sizes}) > 1:
        on = ", ".join(f"{name}: {size}" for name, size in sizes)
        raise NotImplementedError(
            "group: required ranks of which those of a host follow each other, as many on each, "
            f"got by rank {on}; pass a group made by dist.new_group of such ranks"
        )
    per_host = sizes[0][1]
    place, session = group.rank() % per_host, "".join(fact["token"] for fact in facts)
    store = PrefixStore(f"{names[group.rank()]}/{session}", store_of(group))
    return Hosts(group, names, Near(store, place, per_host), session)
