"""Reports on the collectives of a graph: replaced or not, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """One collective of a graph.

    Attributes:
        collective: its kind, for example ``"all-gather"``.
        node: its name in the graph.
        product: name of the product that it feeds or is fed by, "" if there is none.
        where: the user's line of code, "" if the graph does not say.
        group: name of the process group.
        world: ranks of the group, 0 if that is not known.
        shapes: of operands and result, in words.
        replaced: whether ficco's operator has replaced it.
        operator: that operator, "" if nothing was replaced.
        reason: the change, or the reason why there is none.
    """

    collective: str
    node: str
    product: str = ""
    where: str = ""
    group: str = ""
    world: int = 0
    shapes: str = ""
    replaced: bool = False
    operator: str = ""
    reason: str = ""

    def __str__(self) -> str:
        done = f"replaced by {self.operator}" if self.replaced else "left"
        product = f" with {self.product}" if self.product else ""
        about = "; ".join(text for text in (self.shapes, self.where) if text)
        return f"{self.collective} {self.node}{product}: {done}: {self.reason} ({about})"


@dataclass
class Report:
    """One :class:`Entry` for each collective of the graphs that a pass has seen, in order.

    Prints as a table. A report is true if something was replaced.
    """

    entries: list[Entry] = field(default_factory=list)
    graphs: int = 0

    @property
    def replaced(self) -> list[Entry]:
        """Collectives that an operator of ficco has replaced."""
        return [entry for entry in self.entries if entry.replaced]

    @property
    def left(self) -> list[Entry]:
        """Collectives that were not replaced."""
        return [entry for entry in self.entries if not entry.replaced]

    def add(self, other: Report) -> None:
        """Append another graph's report."""
        self.entries += other.entries
        self.graphs += other.graphs

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __bool__(self) -> bool:
        return bool(self.replaced)

    def __str__(self) -> str:
        seen = f"{self.graphs} graph{'s' * (self.graphs != 1)}"
        head = (
            f"{len(self.entries)} collective{'s' * (len(self.entries) != 1)} in {seen}: "
            f"{len(self.replaced)} replaced, {len(self.left)} left"
        )
        rows = [("collective", "node", "group", "shapes", "decision", "reason", "where")]
        for one in self.entries:
            group = f"{one.group} x{one.world}" if one.world else one.group
            decision = one.operator or "left"
            rows.append(
                (one.collective, one.node, group, one.shapes, decision, one.reason, one.where)
            )
        if not self.entries:
            return head
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([head, *lines])
