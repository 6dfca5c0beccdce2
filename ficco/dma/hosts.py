"""Hosts of a group, and the ranks on each."""

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

#: The variable that names the host of a rank, for containers of one host that share no memory.
VARIABLE = "FICCO_HOST"


@dataclass(frozen=True)
class Near:
    """The ranks of one host, numbered from 0, with a separate store."""

    store: Store
    place: int
    count: int

    def rank(self) -> int:
        return self.place

    def size(self) -> int:
        return self.count


@dataclass(frozen=True)
class Hosts:
    """The hosts of a group. Ranks of one host are consecutive; all hosts have equally many ranks.

    Attributes:
        group: all ranks.
        names: name of each rank's host.
        near: the ranks of this rank's host.
        session: identifies this group among all groups that have used the same store.
    """

    group: ProcessGroup
    names: tuple[str, ...] = ()
    near: Any = None
    session: str = ""

    @classmethod
    def one(cls, group: ProcessGroup) -> Hosts:
        """Hosts of a group whose ranks all share one host."""
        return cls(group, ("",) * group.size(), group)

    @property
    def count(self) -> int:
        """Number of hosts."""
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
        """The ranks at this rank's position on the other hosts."""
        ranks = range(self.near.rank(), len(self.names), self.near.size())
        return [rank for rank in ranks if rank not in self.here]

    def spread(self, near: list[Any], absent: Any) -> list[Any]:
        """Values of this host's ranks, by rank of the group; ``absent`` for all other ranks."""
        rest = len(self.names) - self.first - len(near)
        return [absent] * self.first + near + [absent] * rest

    def named(self, rank: int | None) -> str:
        """The host of a rank, for errors; empty if there is only one host."""
        return "" if rank is None or self.count == 1 else self.names[rank]

    def store(self, purpose: str) -> Store:
        """A separate connection to the group's store, with keys of this session only."""
        store: Any = store_of(self.group)
        if hasattr(store, "clone"):  # not in every release: threads then share a connection
            store = store.clone()
        return PrefixStore(f"ficco/{purpose}/{self.session}", store)


def hosts_of(group: ProcessGroup, timeout_s: float, operator: str) -> Hosts:
    """Determine which ranks share a host, by their boot ids or the variable ``FICCO_HOST``.
    Collective.

    Raises:
        NotImplementedError: the ranks of a host are not consecutive or cannot share memory, or
            hosts have different numbers of ranks.
        SignalTimeout: a rank is absent.
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
        namesakes = [boot for boot, name in by_boot.items() if name == fact["host"]]
        name = f"{fact['host']} ({len(namesakes) + 1})" if namesakes else fact["host"]
        by_boot.setdefault(fact["boot"], name)
    names = tuple(fact["named"] or by_boot[fact["boot"]] for fact in facts)
    for name in dict.fromkeys(names):  # on every rank, so that all refuse an unsupported host
        require_shareable({rank: facts[rank] for rank, host in enumerate(names) if host == name})
    if len(set(names)) == 1:
        return Hosts.one(group)
    sizes = [(name, len(list(ranks))) for name, ranks in groupby(names)]
    if len(sizes) > len(set(names)) or len({size for _, size in sizes}) > 1:
        by_rank = ", ".join(f"{name}: {size}" for name, size in sizes)
        raise NotImplementedError(
            "group: required consecutive ranks on each host, as many on each, "
            f"got by rank {by_rank}; pass a group made by dist.new_group of such ranks"
        )
    per_host = sizes[0][1]
    place, session = group.rank() % per_host, "".join(fact["token"] for fact in facts)
    store = PrefixStore(f"{names[group.rank()]}/{session}", store_of(group))
    return Hosts(group, names, Near(store, place, per_host), session)
