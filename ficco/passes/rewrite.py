"""Puts ficco's operators into a graph, and reports which collectives they replace."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, GraphModule, Node

from ficco.ops.library import product_of
from ficco.ops.operands import process_group
from ficco.passes.graph import (
    COLLECTIVES,
    MatrixProduct,
    Order,
    arguments,
    aten,
    canonical,
    collective,
    is_size,
    is_wait,
    of_ranks,
    origin,
    same,
    source_of,
    span,
    tensor_of,
    total,
    value,
)
from ficco.passes.match import (
    EPILOGUES,
    PROLOGUES,
    CollectiveCall,
    Epilogue,
    Leave,
    Pattern,
    Prologue,
    call_of,
    epilogue,
    prologue,
    world_of,
)
from ficco.problems.scaling import RECIPES, factor_count
from ficco.runtime import counters
from ficco.schedules import Schedule


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


def replace(
    graph: GraphModule | Graph,
    *,
    group: ProcessGroup | DeviceMesh | str | None = None,
    schedule: str = "auto",
) -> Report:
    """Replace collectives that feed a product, or are fed by one, by ficco's operators.

    Changes the graph in place. It must consist of ATen operations and have fake tensors, as graphs
    of torch.compile after autograd or of ``make_fx`` do. The report has the reason why a collective
    stays, and :func:`ficco.counters` counts it.

    Args:
        graph: a graph or its module, which is recompiled.
        group: replace only collectives of this group (or its name); all groups by default.
        schedule: the schedule of every operator.

    Raises:
        NotOverlapped: a collective stays, within :func:`ficco.expect`; the rest has been replaced.
        ValueError: the graph, the group or the schedule is not valid.
    """
    report = replace_in(graph, named(group, schedule), schedule)
    refuse_left(report.left)
    return report


def refuse_left(left: Sequence[Entry]) -> None:
    """Raise ``NotOverlapped`` for collectives that stay, within :func:`ficco.expect`."""
    for entry in left:
        at = entry.where and f" at {entry.where}"
        counters.refuse_collective(entry.group, f"{entry.collective}{at}", entry.reason)


def replace_in(graph: GraphModule | Graph, group: str | None, schedule: str) -> Report:
    """As :func:`replace`, for the name of a group. Collectives that stay are counted, not refused:
    the function compiled from the graph refuses them at each call."""
    if not isinstance(graph, Graph | GraphModule):
        raise ValueError(
            f"graph: required a torch.fx Graph or GraphModule, got {type(graph).__name__}; "
            "compile a model with ficco.passes.backend()"
        )
    if isinstance(graph, Graph):
        return _replace(graph, group, schedule)
    report = Report()
    for module in graph.modules():  # regions that are compiled separately are modules inside
        if isinstance(module, GraphModule):
            part = _replace(module.graph, group, schedule)
            if part:
                module.recompile()
            report.add(part)
    return report


def named(group: Any, schedule: Any) -> str | None:
    """The name of a group, None for all; ``ValueError`` if it or the schedule is not valid."""
    if not isinstance(schedule, str):
        raise ValueError(f"schedule: required 'auto' or a name, got {schedule!r}")
    if schedule != "auto":
        Schedule.parse(schedule)
    return group if isinstance(group, str) or group is None else process_group(group).group_name


def _replace(graph: Graph, group: str | None, schedule: str) -> Report:
    entries: dict[Node, Entry] = {node: _entry(node) for node in graph.nodes if collective(node)}
    for node in entries:
        if not entries[node].replaced:
            entries |= _visit(node, group, schedule)
    report = Report(list(entries.values()), graphs=1)
    for entry in report.left:
        counters.count_collective(entry.group, entry.collective)
    if report:
        # Results of operators need no wait: calls run on the current stream.
        for node in list(graph.nodes):
            if is_wait(node) and _is_ready(source_of(node.args[0])):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
        graph.lint()
    return report


def _is_ready(node: Node) -> bool:
    """Whether a tensor is ready: no collective may still be writing it."""
    if node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return is_wait(node) or getattr(node.target, "namespace", "") in ("aten", "prims", "ficco")


def _visit(node: Node, group: str | None, schedule: str) -> dict[Node, Entry]:
    """Replace one collective, and that of its scales, or report why it stays."""
    refused: list[Leave] = []
    entry = _entry(node)
    try:
        call = call_of(node, group)
        for match, served in ((prologue, PROLOGUES), (epilogue, EPILOGUES)):
            if call.name not in served:
                continue
            try:
                pattern = match(call)
                done = dataclasses.replace(
                    entry,
                    product=", ".join(chosen.node.name for chosen in pattern.products),
                    where=origin(pattern.products[0].node, node),
                    shapes=_shapes(pattern),
                    replaced=True,
                    operator=pattern.operator,
                )
                scales = pattern.scale_chain[:1] if isinstance(pattern, Prologue) else ()
                own = {one: _entry(one) for one in scales}
                entries = {node: dataclasses.replace(done, reason=_apply(pattern, schedule))}
                for one in scales:
                    if one not in one.graph.nodes:  # nothing else uses them
                        why, was = "scales travel with the rows that they are of", own[one]
                        entries[one] = dataclasses.replace(
                            done, node=was.node, shapes=was.shapes, reason=why
                        )
                return entries
            except Leave as error:
                refused.append(error)
    except Leave as error:
        refused.append(error)
    except Exception as error:  # an unforeseen kind of graph
        refused.append(Leave(f"not understood: {type(error).__name__}: {error}"))
    near = [one for one in refused if one.product] or refused
    about = near[0].product
    reason = "; ".join(dict.fromkeys(map(str, near)))
    name = about.name if about else ""
    return {
        node: dataclasses.replace(entry, product=name, where=origin(about, node), reason=reason)
    }


def _entry(node: Node) -> Entry:
    """Report entry of a collective, without its product."""
    name = collective(node) or ""
    by_name = arguments(node)
    tensor, result = value(by_name.get("input")), value(node)
    known = tensor is not None and result is not None
    return Entry(
        COLLECTIVES.get(name, name),
        node.name,
        group=str(by_name.get("group_name", "")),
        world=world_of(node),
        shapes=f"{_text(tensor)} -> {_text(result)}" if known else "",
    )


def _text(tensor: torch.Tensor | None) -> str:
    return "" if tensor is None else "x".join(map(str, tensor.shape))


def _shapes(pattern: Pattern) -> str:
    if isinstance(pattern, Epilogue):
        parts = [f"{_text(value(p.a))} @ {_text(value(p.b))}" for p in pattern.products]
        return f"{' + '.join(parts)} {_dtype(pattern.products[0].a)}"
    a, (matmul,) = pattern.call.tensor, pattern.products
    return f"{_text(value(a))} @ {_text(value(matmul.b))} {_dtype(matmul.a)}"


def _dtype(node: Node) -> str:
    return str(tensor_of(node).dtype).removeprefix("torch.")


# Existing nodes are changed only once all new ones are made, so that an error leaves no trace.


class Writer:
    """Creates nodes before a node, and can remove them again."""

    def __init__(self, like: Node) -> None:
        self.graph = like.graph
        self.like = like
        self.created: list[Node] = []

    def __call__(self, at: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(at):
            node = self.graph.call_function(target, args, kwargs)
        self.created.append(node)
        copied = {"stack_trace", "nn_module_stack", "seq_nr", "partitioner_tag"}
        node.meta |= {key: kind for key, kind in self.like.meta.items() if key in copied}
        node.meta["val"] = _faked(node)
        return node

    def shaped(self, at: Node, node: Node, shape: Sequence[Any]) -> Node:
        """A tensor in another shape; the same node if it has that already."""
        now = tensor_of(node).shape
        if len(now) == len(shape) and all(map(same, now, shape)):
            return node
        return self(at, aten.reshape.default, node, [self.size(at, size) for size in shape])

    def size(self, at: Node, size: Any) -> Any:
        """A size as an argument: a number, or a node that computes it from the graph's inputs."""
        if isinstance(size, int):
            return size
        return self._computed(at, size.node.expr)

    def _computed(self, at: Node, expr: Any) -> Any:
        if expr.is_Integer:
            return int(expr)
        if expr.is_Symbol:
            return self._symbol(at, expr)
        combine = {"Add": operator.add, "Mul": operator.mul, "FloorDiv": operator.floordiv}
        if type(expr).__name__ not in combine:
            raise Leave(f"the dynamic size {expr}")
        parts = [self._computed(at, part) for part in expr.args]
        done = parts[0]
        for part in parts[1:]:
            done = self(at, combine[type(expr).__name__], done, part)
        return done

    def _symbol(self, at: Node, symbol: Any) -> Node:
        """The node of a dynamic size that is an input of the graph, or a dimension of one."""
        inputs: list[Node] = [node for node in self.graph.nodes if node.op == "placeholder"]
        for node in inputs:
            if _expr(node.meta.get("val")) == symbol:
                return node
        for node in inputs:
            tensor = value(node)
            for dim, size in enumerate(tensor.shape if tensor is not None else ()):
                if _expr(size) == symbol:
                    return self(at, aten.sym_size.int, node, dim)
        raise Leave(f"the dynamic size {symbol} is of no input of the graph")

    def sized(self, nodes: Sequence[Node]) -> list[tuple[Node, Any]]:
        """The nodes that read sizes of nodes that may go, each with its size from the inputs."""
        asking = [user for node in nodes for user in node.users if is_size(user)]
        return [(user, self.size(user, user.meta["val"])) for user in asking]

    def moved(
        self, at: Node, node: Node, now: Order, then: Order, columns: Any, shape: Sequence[Any]
    ) -> Node:
        """A tensor with its rows reordered from ``now`` to ``then``, in a shape."""
        if now != then:
            node = self.shaped(at, node, [*(label.size for label in now), columns])
            perm = [now.index(label) for label in then]
            node = self(at, aten.permute.default, node, [*perm, len(perm)])
        return self.shaped(at, node, shape)

    def lying(self, at: Node, node: Node) -> Node:
        """A tensor with the strides of ``at``, since users of that may view it.

        It is copied if it has others; products and collectives are contiguous.
        """
        now, then = tensor_of(node), tensor_of(at)
        strides = zip(then.shape, now.stride(), then.stride(), strict=True)
        if all(same(size, 1) or same(one, other) for size, one, other in strides):
            return node
        return self(at, aten.clone.default, node, memory_format=torch.contiguous_format)

    def undo(self) -> None:
        for node in reversed(self.created):
            self.graph.erase_node(node)


def _expr(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else None


def _faked(node: Node) -> Any:
    """The result of a node for the fake values of its operands."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _apply(pattern: Pattern, schedule: str) -> str:
    """Change the graph, and describe the change. After an error the graph is unchanged."""
    write = Writer(pattern.products[0].node)
    try:
        if isinstance(pattern, Epilogue):
            finish = _apply_epilogue(pattern, schedule, write)
        else:
            assert isinstance(pattern, Prologue)
            finish = _apply_prologue(pattern, schedule, write)
    except BaseException:
        write.undo()
        raise
    return finish()


def _apply_prologue(pattern: Prologue, schedule: str, write: Writer) -> Callable[[], str]:
    call, (chosen,), place = pattern.call, pattern.products, pattern.place
    notes = []
    shard = call.tensor
    if pattern.converts is not None:
        (convert,) = pattern.converts.nodes
        shard = write(place, convert.target, shard, *convert.args[1:], **convert.kwargs)
        if convert.target != aten.view.dtype:
            notes.append(f"converted to {_dtype(shard)} before it travels")
    k, n = tensor_of(chosen.a).shape[-1], chosen.columns
    ordered = canonical(pattern.rows)
    if not same(tensor_of(shard).shape[-1], k) or tensor_of(shard).dim() < 2:
        shard = write.shaped(place, shard, [_rows(call, ordered), k])
    of_a = pattern.scale
    if of_a is not None and pattern.scale_chain:
        columns = tensor_of(chosen.scales[0]).shape[-1]
        of_a = write.shaped(place, of_a, [_rows(call, ordered), columns])
        notes.append("its scales travel with it")
    where = write, place, pattern.operator
    out, gathered = _call(*where, shard, of_a, chosen, call, schedule, bool(pattern.others))
    if gathered is not None:
        gathered = write.shaped(place, gathered, tensor_of(call.node).shape)
        notes.append(f"the gathered tensor is kept for {_list(pattern.others)}")
    at = chosen.node
    out = write.lying(at, write.moved(at, out, ordered, pattern.rows, n, tensor_of(at).shape))
    if pattern.rows != ordered:
        notes.append("the product's rows are put in order by a copy")
    if chosen.bias is not None and not chosen.scales:
        out = write(at, aten.add.Tensor, out, chosen.bias)
        notes.append("the bias is added to its result")
    sizes = write.sized([*call.results, *pattern.chain, at])

    def finish() -> str:
        _resize(sizes)
        for node in pattern.hoisted:
            write.created[0].prepend(node)
        after = set(span(place))
        for node in pattern.chain:
            if node not in after:
                place.prepend(node)
        at.replace_all_uses_with(out)
        for result in reversed(call.results):
            if gathered is not None:
                result.replace_all_uses_with(gathered)
        if pattern.converts is not None and gathered is not None:
            pattern.converts.result.replace_all_uses_with(pattern.converts.source)
            for node in pattern.chain:
                node.meta["val"] = _faked(node)
        _erase([*call.results, *pattern.chain, *pattern.scale_chain, at])
        return "; ".join(notes) or "they are one operator now"

    return finish


def _apply_epilogue(pattern: Epilogue, schedule: str, write: Writer) -> Callable[[], str]:
    call, at = pattern.call, pattern.call.node
    notes = []
    scatters = call.name != "all_reduce"
    now, then = pattern.rows, canonical(pattern.rows)
    if scatters and now != then:
        notes.append("the operand's rows are put in the order of the ranks by a copy")
    chosen, moves = pattern.products[0], scatters and now != then
    several = len(pattern.products) > 1

    def in_order(node: Node) -> Node:
        if not moves and not several:
            return node
        columns = tensor_of(node).shape[-1]
        return write.moved(at, node, now, then if scatters else now, columns, [total(now), columns])

    if several:
        left = [in_order(one.a) for one in pattern.products]
        a = write(at, aten.cat.default, left, 1)
        right = [_matrix(write, at, one) for one in pattern.products]
        b = write(at, aten.cat.default, right, 0)
        notes.append(f"the sum of {len(left)} products is one product of joined operands")
        out = write(at, product_of(pattern.operator), a, b, call.group, schedule)
    else:
        of_a = chosen.scales[0] if chosen.scales else None
        if of_a is not None and not same(tensor_of(of_a).numel(), 1):
            of_a = in_order(of_a)
        where = write, at, pattern.operator
        out, _ = _call(*where, in_order(chosen.a), of_a, chosen, call, schedule, False)
    if pattern.average:
        out = write(at, aten.mul.Tensor, out, 1 / call.world)
        notes.append(f"the sum is divided by {call.world} afterwards")
    if scatters:
        out = write.shaped(at, out, tensor_of(at).shape)
    else:
        columns = pattern.products[0].columns
        moved = write.moved(at, out, now, then, columns, tensor_of(at).shape)
        out = write.lying(at, moved)
        if out is not moved:
            notes.append("the result's rows are put in order by a copy")
    products = [chosen.node for chosen in pattern.products]
    sizes = write.sized([*call.results, *pattern.chain, *products])

    def finish() -> str:
        _resize(sizes)
        for copy in pattern.copies:
            copy.replace_all_uses_with(copy.args[1])  # type: ignore[arg-type]
            copy.graph.erase_node(copy)
        for node in reversed(call.results):
            node.replace_all_uses_with(out)
        _erase([*call.results, *pattern.chain, *products])
        return "; ".join(notes) or "they are one operator now"

    return finish


def _call(
    write: Writer,
    at: Node,
    name: str,
    a: Node,
    of_a: Node | None,
    chosen: MatrixProduct,
    call: CollectiveCall,
    schedule: str,
    gathered: bool,
) -> tuple[Node, Node | None]:
    """The nodes of an operator's product and, if asked for, of the gathered A. ``of_a``: the scale
    of a."""
    operands = [a, _matrix(write, at, chosen)]
    if of_a is not None:
        more: Any = of_a, _scale_of_b(write, at, chosen), chosen.bias
        operands += [*more, tensor_of(chosen.node).dtype, chosen.fast_accum]  # type: ignore[list-item]
    op = product_of(name, of_a is not None, gathered)
    try:
        results = write(at, op, *operands, call.group, schedule)
    except (ValueError, NotImplementedError) as error:
        raise Leave(str(error), chosen.node) from None
    if not gathered:
        return results, None
    first, second = (write(at, operator.getitem, results, i) for i in (0, 1))
    return first, second


def _matrix(write: Writer, at: Node, chosen: MatrixProduct) -> Node:
    """b as [k, n]."""
    return write(at, aten.permute.default, chosen.b, [1, 0]) if chosen.transposed else chosen.b


def _scale_of_b(write: Writer, at: Node, chosen: MatrixProduct) -> Node:
    """Scale of b without the padding rows of ``_scaled_mm_v2``."""
    scale, rows = chosen.scales[1], tensor_of(chosen.b).shape[0]
    shape, needed = tensor_of(scale).shape, factor_count(rows, RECIPES["block"].b[0])
    if len(shape) != 2 or same(shape[0], 1) or not isinstance(needed, int) or shape[0] <= needed:
        return scale
    return write(at, aten.slice.Tensor, scale, 0, 0, needed)


def _rows(call: CollectiveCall, ordered: Order) -> Any:
    """Rows of the operand that travels: those of a shard, or all in an all-to-all."""
    exchanged = call.name == "all_to_all_single"
    return total([label for label in ordered if exchanged or not of_ranks(label)])


def _list(nodes: Sequence[Node]) -> str:
    names = list(dict.fromkeys(node.name for node in nodes))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _resize(sizes: Sequence[tuple[Node, Any]]) -> None:
    for asking, size in sizes:
        asking.replace_all_uses_with(size)
        asking.graph.erase_node(asking)


def _erase(nodes: Sequence[Node]) -> None:
    """Erase those of the nodes that nothing uses, in order from users to inputs."""
    rest = list(nodes)
    while free := [node for node in rest if not node.users]:
        for node in free:
            node.graph.erase_node(node)
        rest = [node for node in rest if node not in free]
