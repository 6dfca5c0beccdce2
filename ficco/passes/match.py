"""Finds the collectives of a graph that can be replaced, and why others cannot. Changes nothing."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.fx import Node

from ficco.passes.graph import (
    COLLECTIVES,
    OTHER_FORMS,
    MatrixProduct,
    Order,
    Relayout,
    Size,
    Unclear,
    arguments,
    aten,
    canonical,
    collective,
    inner_users,
    is_op,
    is_size,
    is_wait,
    known,
    of_ranks,
    op_of,
    original,
    product,
    relayout_to,
    relayouts_from,
    rows_of,
    same,
    source_of,
    span,
    storage,
    tensor_of,
    total,
    value,
    write_between,
    written,
)
from ficco.problems.products import ITEMSIZE
from ficco.problems.scaling import FAMILIES

#: The operators for a collective before a product, and after one.
PROLOGUES = {
    "all_gather_into_tensor": "all_gather_matmul",
    "all_to_all_single": "all_to_all_matmul",
}
EPILOGUES = {
    "reduce_scatter_tensor": "matmul_reduce_scatter",
    "all_to_all_single": "matmul_all_to_all",
    "all_reduce": "matmul_all_reduce",
}


class Leave(Exception):
    """A collective is not replaced. The text says why; ``product`` is the product it is about."""

    def __init__(self, reason: str, product: Node | None = None) -> None:
        super().__init__(reason)
        self.product = product


@dataclass(frozen=True)
class CollectiveCall:
    """A collective and what its node states."""

    node: Node
    name: str
    group: str
    world: int
    results: tuple[Node, ...]  #: the node itself and its wait_tensor nodes

    @property
    def tensor(self) -> Node:
        return self.node.args[0]  # type: ignore[return-value]


@dataclass(frozen=True)
class Pattern:
    """A collective and the products that an operator of ficco joins with it.

    Attributes:
        rows: order of the travelling rows in the products.
        chain: the nodes between the collective and the products.
    """

    operator: str
    call: CollectiveCall
    products: tuple[MatrixProduct, ...]
    rows: Order
    chain: tuple[Node, ...]


@dataclass(frozen=True)
class Prologue(Pattern):
    """A collective whose result is multiplied, by one product.

    Attributes:
        place: the node before which the operator goes; the chain moves after it.
        hoisted: nodes that b needs and that move before ``place``, too.
        others: other users of the gathered tensor.
        converts: the relayout that converts the gathered tensor; it converts the shard instead.
        scale: of float8 rows, those of this rank's or, if none travel with them, of all.
        scale_chain: the collective that gathers them, and the nodes between it and the product.
    """

    place: Node
    hoisted: tuple[Node, ...]
    others: tuple[Node, ...]
    converts: Relayout | None
    scale: Node | None = None
    scale_chain: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Epilogue(Pattern):
    """A product, or a sum of several, whose result goes into a collective.

    Attributes:
        copies: nodes that only overwrite a product with another tensor.
        average: whether the sum is divided by the number of ranks.
    """

    copies: tuple[Node, ...]
    average: bool


def call_of(node: Node, group: str | None) -> CollectiveCall:
    """The collective of a node; :class:`Leave` if it cannot be replaced whatever its product."""
    name = collective(node)
    assert name is not None
    if name not in COLLECTIVES:
        raise Leave(OTHER_FORMS.get(name, f"no operator of ficco stands for {name}"))
    by_name = arguments(node)
    if not isinstance(by_name["group_name"], str):
        raise Leave("the group is an object that the graph computes, not a name")
    if group is not None and by_name["group_name"] != group:
        raise Leave("it belongs to another group than the given one")
    world = world_of(node)
    if not world:
        raise Leave(f"there is no process group of the name {by_name['group_name']!r}")
    if world == 1:
        raise Leave("one rank: nothing travels")
    waits = [user for user in node.users if is_wait(user)]
    for user in node.users:
        if user not in waits and user.op != "output" and not is_size(user):
            raise Leave(f"{user.name} uses the result before it is waited for")
    if not waits:
        raise Leave("nothing in this graph waits for the result")
    tensor, result = value(by_name.get("input")), value(node)
    if tensor is None or result is None:
        raise Leave("the graph was traced without fake tensors: no shapes are known")
    if tensor.device.type not in ("cpu", "cuda"):
        raise Leave(f"{tensor.device.type} tensors are not served")
    if any(same(size, 0) for size in tensor.shape):
        raise Leave("a tensor without elements")
    return CollectiveCall(node, name, by_name["group_name"], world, (node, *waits))


def world_of(node: Node) -> int:
    """Ranks of a collective's group; 0 if they are not known."""
    by_name = arguments(node)
    if isinstance(by_name.get("group_size"), int):
        return int(by_name["group_size"])
    try:
        return dist.distributed_c10d._get_group_size_by_name(by_name["group_name"])
    except (RuntimeError, LookupError, TypeError, ValueError):  # no such group here
        return 0


# A collective before a product.


@dataclass(frozen=True)
class Leaf:
    """A user of the gathered tensor, at the end of a chain of views."""

    user: Node
    tensor: Node
    order: Order | None  #: None if the rows could not be tracked
    relayouts: tuple[Relayout, ...]


def prologue(call: CollectiveCall) -> Prologue:
    """A collective and the product that it feeds."""
    name = PROLOGUES[call.name]
    leaves = [leaf for wait in call.results[1:] for leaf in _leaves(wait, _gathered(call), ())]
    position = {node: i for i, node in enumerate(call.node.graph.nodes)}
    leaves.sort(key=lambda leaf: position[leaf.user])
    held = {storage(result) for result in call.results} | {leaf.tensor for leaf in leaves}
    for leaf in leaves:
        if any(target in held or storage(target) in held for target in written(leaf.user)):
            raise Leave(f"{leaf.user.name} may write to the result")
    refused: list[Leave] = []
    candidates = []
    for leaf in leaves:
        try:
            candidates.append(_candidate(call, leaf))
        except (Leave, Unclear) as error:
            about = leaf.user if isinstance(product(leaf.user), MatrixProduct) else None
            refused.append(Leave(str(error), about))
    if not candidates:
        near = [one for one in refused if one.product] or refused
        raise near[0] if near else Leave("nothing uses the result")
    candidates.sort(key=lambda one: _width(one[0]), reverse=True)
    for chosen, rows, converts in candidates:
        users = [*(leaf.user for leaf in leaves), *call.node.users]
        others = tuple(
            u for u in users if u is not chosen.node and u not in call.results and not is_size(u)
        )
        if others and name == "all_to_all_matmul":
            refused.append(Leave(f"{others[0].name} uses what was exchanged, too", chosen.node))
            continue
        place = leaves[0].user
        try:
            scale, scale_chain = _scale_of(call, chosen, rows)
            hoisted = _hoisted(call, chosen, scale, place, position)
        except Leave as error:
            refused.append(error)
            continue
        travel = [(call.node, call.tensor)]
        travel += [(scale_chain[0], scale)] if scale is not None and scale_chain else []
        for gather, tensor in travel:
            write = write_between(gather, place, [tensor])
            if write is not None:
                why = f"{write.name} may write to the operand before the product"
                raise Leave(why, chosen.node)
        views = {node for wait in call.results[1:] for node in _views(wait)}
        chain = tuple(sorted(views, key=position.__getitem__))
        where = name, call, (chosen,), rows, chain, place
        return Prologue(*where, hoisted, others, converts, scale, scale_chain)
    raise refused[-1]


def _scale_of(
    call: CollectiveCall, chosen: MatrixProduct, rows: Order
) -> tuple[Node | None, tuple[Node, ...]]:
    """The scale of a product's left operand, as its operator takes it: that of this rank's rows
    where it travels like them, in one collective more, which comes first of the nodes that the
    operator is instead of; else as it is."""
    if not chosen.scales:
        return None, ()
    scale = node = chosen.scales[0]
    if same(tensor_of(scale).numel(), 1):
        return scale, ()
    relayouts = []
    while (relayout := relayout_to(node)) is not None and relayout.converts is None:
        relayouts.append(relayout)
        node = relayout.source
    gather = node.args[0] if is_wait(node) else None
    if isinstance(gather, Node) and collective(gather) == call.name:
        other = call_of(gather, call.group)
        order = _gathered(other)
        try:
            for relayout in reversed(relayouts):
                order = relayout.forward(order)
            travels = rows_of(order, tensor_of(scale).shape) == rows
        except Unclear:
            travels = False
        if not travels:
            raise Leave("the scales of the rows lie in another order than the rows", chosen.node)
        between = [node for relayout in reversed(relayouts) for node in relayout.nodes]
        write = write_between(gather, chosen.node, [*other.results, *between])
        if write is not None:
            raise Leave(f"{write.name} may write to the scales of the rows", chosen.node)
        return other.tensor, (*other.results, *between)
    if call.name != "all_gather_into_tensor" or rows != canonical(rows):
        raise Leave("the scales of the rows do not travel with them", chosen.node)
    return scale, ()


def _gathered(call: CollectiveCall) -> Order:
    """The labels of the gathered tensor, rank by rank."""
    result, tensor = tensor_of(call.node), tensor_of(call.tensor)
    shape = list(tensor.shape)
    if call.name == "all_to_all_single":
        shape[0] = _block(call)
    if not same(result.shape[0], call.world * shape[0]):
        raise Leave("the rows are not the same number on every rank")
    return original((call.world, *shape))


def _block(call: CollectiveCall) -> Size:
    """Rows of each block of an all-to-all, which must be equal."""
    by_name = arguments(call.node)
    blocks = [known(n) for n in (*by_name["input_split_sizes"], *by_name["output_split_sizes"])]
    if len(blocks) != 2 * call.world or not all(same(blocks[0], n) for n in blocks):
        raise Leave("uneven blocks: the graph of one rank lacks the block sizes of the other ranks")
    if not same(tensor_of(call.tensor).shape[0], call.world * blocks[0]):
        raise Leave("the blocks do not make up the rows of the operand")
    return blocks[0]


def _leaves(node: Node, order: Order | None, relayouts: tuple[Relayout, ...]) -> Iterator[Leaf]:
    seen = set()
    for user, relayout in relayouts_from(node):
        if relayout is None:
            yield Leaf(user, node, order, relayouts)
            continue
        for other in inner_users(relayout):
            yield Leaf(other, node, None, relayouts)
        if relayout.result in seen:
            continue
        seen.add(relayout.result)
        try:
            after = None if order is None else relayout.forward(order)
        except Unclear:
            after = None
        yield from _leaves(relayout.result, after, (*relayouts, relayout))


def _views(node: Node) -> set[Node]:
    """The nodes of all relayouts that follow a node, including those that nothing uses."""
    views: set[Node] = set()
    for _, relayout in relayouts_from(node):
        if relayout is not None and relayout.result not in views:
            views |= {*relayout.nodes, *_views(relayout.result)}
    return views


def _candidate(call: CollectiveCall, leaf: Leaf) -> tuple[MatrixProduct, Order, Relayout | None]:
    """The product at a leaf, the order of its rows, and the conversion on the way to it."""
    matmul = product(leaf.user)
    if isinstance(matmul, str):
        raise Leave(matmul)
    if leaf.tensor in matmul.scales:
        raise Leave("the gathered tensor is a scale; scales travel with their rows")
    if leaf.tensor in (matmul.b, matmul.bias):
        raise Leave("the gathered tensor is the right operand of the product")
    if leaf.order is None:
        raise Leave("the rows cannot be followed through a view")
    rows = rows_of(leaf.order, tensor_of(leaf.tensor).shape)
    if rows is None:
        raise Leave("the product sums over gathered rows, or over gathered columns")
    if not _all_ranks(call, rows):
        raise Leave("the product sums over the ranks")
    converts = [relayout for relayout in leaf.relayouts if relayout.converts is not None]
    if len(converts) > 1:
        raise Leave("the tensor is converted twice on the way to the product")
    if converts:
        way = leaf.relayouts[: leaf.relayouts.index(converts[0]) + 1]
        if len(call.results) > 2 or not all(map(_only_way, way)):
            raise Leave("the tensor is converted for the product and used unconverted elsewhere")
    _check_dtype(matmul)
    return matmul, rows, converts[0] if converts else None


def _all_ranks(call: CollectiveCall, rows: Order) -> bool:
    """Whether all ranks are among the rows, and none among the columns."""
    return same(total([label for label in rows if of_ranks(label)]), call.world)


def _only_way(relayout: Relayout) -> bool:
    """Whether nothing but the relayout uses its source."""
    users = [user for user in relayout.source.users if user not in relayout.nodes]
    return all(map(is_size, users)) and not inner_users(relayout)


def _check_dtype(matmul: MatrixProduct) -> None:
    """:class:`Leave` if the operators do not support the product's dtype."""
    operand = tensor_of(matmul.a)
    dtype = str(operand.dtype).removeprefix("torch.")
    if matmul.scales and dtype in FAMILIES:
        return  # the operator refuses it with a reason
    if dtype not in ITEMSIZE or (dtype == "float64" and operand.device.type != "cpu"):
        raise Leave(f"dtype {dtype} is not served on {operand.device.type}", matmul.node)


def _width(matmul: MatrixProduct) -> int:
    columns = matmul.columns
    return columns if isinstance(columns, int) else 0


def _hoisted(
    call: CollectiveCall,
    chosen: MatrixProduct,
    scale: Node | None,
    place: Node,
    position: dict[Node, int],
) -> tuple[Node, ...]:
    """The nodes that have to move before ``place`` so that b and the scales are there; Leave if
    they cannot."""
    needed: set[Node] = set()
    operands = [scale if node in chosen.scales[:1] else node for node in chosen.operands]
    held = [node for node in operands if node is not None]
    rest = list(held)
    while rest:
        node = rest.pop()
        if node in needed or position[node] < position[call.node]:
            continue
        if node in call.results:
            raise Leave("the right operand is computed from the gathered tensor", chosen.node)
        needed.add(node)
        rest += node.all_input_nodes
    late = {node for node in needed if position[node] > position[place]}
    write = write_between(place.prev, chosen.node, held)  # with place, which may write itself
    if late and write is None:
        write = next((n for n in span(place, chosen.node) if written(n)), None)
    if write is not None:
        raise Leave(f"{write.name} may write to the right operand", chosen.node)
    for node in late:
        seeded = is_op(node) and torch.Tag.nondeterministic_seeded in op_of(node).tags
        if node.op != "call_function" or collective(node) or is_wait(node) or seeded:
            raise Leave(f"{node.name} cannot move before {place.name}", chosen.node)
    return tuple(sorted(late, key=position.__getitem__))


# A collective after a product.


def epilogue(call: CollectiveCall) -> Epilogue:
    """A collective and the product, or the sum of products, that feeds it."""
    name = EPILOGUES[call.name]
    summands: list[tuple[MatrixProduct, Order]] = []
    chain: list[Node] = []
    copies: list[Node] = []
    _summands(call, call.tensor, {call.node}, _scattered(call), summands, chain, copies)
    first, rows = summands[0]
    for chosen, order in summands:
        if order != rows:
            raise Leave("products whose rows lie in different orders are added", first.node)
        if chosen.scales and len(summands) > 1:
            raise Leave("products with scales of their own are added", first.node)
        write = write_between(chosen.node, call.node, [chosen.a, *chosen.operands])
        if write is not None:
            raise Leave(f"{write.name} may write to an operand of the product", chosen.node)
    average = _average(call, first)
    products = tuple(chosen for chosen, _ in summands)
    return Epilogue(name, call, products, rows, tuple(chain), tuple(copies), average)


def _summands(
    call: CollectiveCall,
    node: Node,
    consumers: set[Node],
    order: Order,
    summands: list[tuple[MatrixProduct, Order]],
    chain: list[Node],
    copies: list[Node],
) -> None:
    """Collect the products whose sum a node is, and the nodes between, which nothing else may
    use."""
    matmul = product(source_of(node))
    terms = _terms(source_of(node))
    if isinstance(matmul, str) and not terms:
        raise Leave(_why_no_product(source_of(node), matmul))
    about = matmul.node if isinstance(matmul, MatrixProduct) else None
    while (relayout := relayout_to(node)) is not None:
        if relayout.converts is not None:
            raise Leave("the product is rounded to another dtype before it is reduced", about)
        copies += _only_overwritten(node, consumers, about)
        if inner_users(relayout):
            raise Leave(f"{inner_users(relayout)[0].name} uses a part of the product, too", about)
        try:
            order = relayout.backward(order)
        except Unclear as error:
            raise Leave(f"the rows cannot be followed: {error}", about) from None
        chain += reversed(relayout.nodes)
        consumers, node = set(relayout.nodes), relayout.source
    if isinstance(matmul, str):
        copies += _only_overwritten(node, consumers, about)
        chain.append(node)
        for term in terms:
            _summands(call, term, {node}, order, summands, chain, copies)
        return
    if matmul.bias is not None:
        raise Leave("the bias is added on every rank, before the sum over ranks", about)
    copies += _only_overwritten(node, consumers, about)
    try:
        rows = rows_of(order, tensor_of(node).shape)
    except Unclear as error:
        raise Leave(f"the rows cannot be followed: {error}", about) from None
    scatters = call.name != "all_reduce"
    if rows is None or (scatters and not _all_ranks(call, rows)):
        raise Leave("the columns of the product are scattered or moved, not its rows", about)
    _check_dtype(matmul)
    summands.append((matmul, rows))


def _terms(node: Node) -> list[Node]:
    """The two terms that a node adds, if both are (sums of) products of its shape and dtype."""
    if node.target != aten.add.Tensor or arguments(node)["alpha"] != 1:
        return []
    terms = [term for term in node.args[:2] if isinstance(term, Node)]
    total = value(node)
    for term in terms:
        one = value(term)
        if one is None or total is None or one.dtype != total.dtype or one.dim() != total.dim():
            return []
        if not all(map(same, one.shape, total.shape)):
            return []
    if len(terms) < 2 or terms[0] is terms[1] or not all(map(_is_sum, terms)):
        return []
    return terms


def _is_sum(node: Node) -> bool:
    """Whether a node is a product or a sum of products."""
    source = source_of(node)
    return isinstance(product(source), MatrixProduct) or bool(_terms(source))


def _why_no_product(node: Node, text: str) -> str:
    maker = node.args[0] if node.target == operator.getitem else node
    if isinstance(maker, Node) and is_op(maker) and op_of(maker).namespace == "ficco":
        return "its product is one operator with another collective already"
    if node.target in (aten.add.Tensor, aten.sub.Tensor):
        terms = [term for term in node.args[:2] if isinstance(term, Node)]
        if any(map(_is_sum, terms)):
            return "the operand is the sum of a product and of something else"
    return f"its operand is no product: {text}"


def _scattered(call: CollectiveCall) -> Order:
    """The labels of a collective's operand."""
    shape = list(tensor_of(call.tensor).shape)
    if call.name == "all_reduce":
        return original(shape)
    if call.name == "reduce_scatter_tensor":
        rows = tensor_of(call.node).shape[0]
        if not same(call.world * rows, shape[0]):
            raise Leave("the rows do not divide evenly")
    else:
        rows = _block(call)
    return original((call.world, rows, *shape[1:]))


def _only_overwritten(node: Node, consumers: set[Node], about: Node | None) -> list[Node]:
    """The users of a node that only overwrite it; :class:`Leave` if any but these and the
    consumers use it."""
    over = [user for user in node.users if _overwrites(user, node)]
    for user in node.users:
        if user not in consumers and user not in over and not is_size(user):
            raise Leave(f"{user.name} uses the product, too", about)
    return over


def _overwrites(user: Node, tensor: Node) -> bool:
    """Whether a user does nothing but overwrite the product with another tensor."""
    if not is_op(user) or user.target != aten.copy.default or user.args[0] is not tensor:
        return False
    before, after = value(user.args[1]), tensor_of(user)
    return (
        before is not None
        and (before.dtype, before.shape) == (after.dtype, after.shape)
        and before.stride() == after.stride()
    )


def _average(call: CollectiveCall, matmul: MatrixProduct) -> bool:
    """Whether the sum is divided by the number of ranks; Leave if that is not exact."""
    reduce_op = str(arguments(call.node).get("reduce_op", "sum")).lower()
    if reduce_op == "sum":
        return False
    if reduce_op != "avg":
        raise Leave(f"it reduces by {reduce_op}, not by a sum", matmul.node)
    if call.world & (call.world - 1):
        raise Leave(f"an average over {call.world} ranks rounds once more than a sum", matmul.node)
    if tensor_of(matmul.node).dtype == torch.float16:
        raise Leave("an average in float16 whose sum could overflow", matmul.node)
    return True
