"""Reads the nodes of a graph of ATen operations: collectives, products, views, writes.

The order of a tensor's rows is tracked through views, permutations and pieces. A collective always
concatenates along the first dimension. A gather or scatter along another one is the same
collective, with the tensor cut up and joined again before or after it, and each framework and
version writes that in its own way. Here a tensor is a list of *labels* in row-major order: views
keep the list, permutations reorder it. Only the final order of the labels counts, so that no list
of spellings is needed.
"""

from __future__ import annotations

import operator
import re
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.functions import FloorDiv

from ficco.problems.scaling import RESULTS

#: An int, or a symbolic one.
Size = Any


def same(one: Size, other: Size) -> bool:
    """Whether two sizes are equal for all values of the graph's dynamic sizes; adds no guard."""
    return bool(statically_known_true(one == other)) or _same_divided(one, other)


def _same_divided(one: Size, other: Size) -> bool:
    """As :func:`same`, for sizes that contain divisions known to have no remainder."""
    symbolic = next((size for size in (one, other) if isinstance(size, torch.SymInt)), None)
    if symbolic is None:
        return False
    shapes = symbolic.node.shape_env
    rest = (one - other).node.expr
    for divided in rest.atoms(FloorDiv):
        whole, by = divided.args
        more, part = whole.as_coeff_Add()  # (x + by - 1) // by rounds up
        if not (by.is_Integer and 0 <= more < by and part.free_symbols):
            continue
        size = shapes.create_symintnode(part, hint=None)
        if statically_known_true(size % int(by) == 0):
            rest = rest.subs(divided, part / by)
    return bool(rest.expand() == 0)


class Label(NamedTuple):
    """A factor of a dimension: its place in the original order, and its size."""

    key: tuple[int, ...]
    size: Size


Order = tuple[Label, ...]


class Unclear(Exception):
    """The order of the rows cannot be tracked; the text says where it was lost."""


def original(sizes: Sequence[Size]) -> Order:
    """The labels of a tensor in its own order; dimensions of one element have none."""
    return tuple(Label((i,), size) for i, size in enumerate(sizes) if not same(size, 1))


def dimensions(order: Order, shape: Sequence[Size]) -> list[Order]:
    """The labels of each dimension of a shape. A label is split if a dimension ends inside it."""
    rest, dims = order, []
    for size in shape:
        mine, rest = split(rest, size)
        dims.append(mine)
    return dims


def split(order: Order, size: Size) -> tuple[Order, Order]:
    """The first labels that span ``size`` elements, and the others."""
    rest, mine = list(order), list[Label]()
    while not same(total(mine), size):
        if not rest:
            raise Unclear("a view that cuts rows apart, or whose sizes are not known")
        label = rest.pop(0)
        room = _quotient(size, total(mine))
        if room is not None and isinstance(label.size, int) and label.size > room:
            second = _quotient(label.size, room)
            if second is None:
                raise Unclear("a view that cuts rows apart")
            rest.insert(0, Label((*label.key, 1), second))
            label = Label((*label.key, 0), room)
        mine.append(label)
    return tuple(mine), tuple(rest)


def permuted(order: Order, shape: Sequence[Size], perm: Sequence[int]) -> Order:
    """The order after ``permute(perm)`` of a tensor of this shape."""
    dims = dimensions(order, shape)
    return joined(dims[i] for i in perm)


def regrouped(order: Order, shape: Sequence[Size], source: int, target: int, pieces: int) -> Order:
    """The order after cutting a dimension into equal pieces and joining them along another."""
    dims = dimensions(order, shape)
    front, dims[source] = split(dims[source], pieces)
    dims[target] = front + dims[target]
    return joined(dims)


def of_ranks(label: Label) -> bool:
    """Whether a label belongs to the first dimension: in a collective's tensor, the ranks."""
    return label.key[0] == 0


def canonical(order: Order) -> Order:
    """The labels in their original order."""
    return tuple(sorted(order))


def rows_of(order: Order, shape: Sequence[Size]) -> Order | None:
    """The labels of a matrix's rows; None if its columns are not whole and in original order."""
    dims = dimensions(order, shape)
    columns, rows = dims[-1], joined(dims[:-1])
    return rows if columns == canonical(joined(dims))[len(rows) :] else None


def total(labels: Sequence[Label]) -> Size:
    """The number of elements that labels span."""
    return prod(label.size for label in labels)


def joined(dims: Any) -> Order:
    """The labels of several dimensions in one list."""
    return tuple(label for dim in dims for label in dim)


def _quotient(size: Size, by: Size) -> int | None:
    """size / by if both are known and it is a whole number."""
    if isinstance(size, int) and isinstance(by, int) and by and size % by == 0:
        return size // by
    return None


aten = torch.ops.aten

#: Namespaces of PyTorch's functional collectives, and other functions there.
_NAMESPACES = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd")
_WAITS = {"wait_tensor", "wait_tensors", "_wrap_tensor_autograd"}

#: Functional collectives by the name of their overload packet, in words. In these graphs a
#: wait_tensor follows each collective, which has its group by name.
COLLECTIVES = {
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all",
}
#: Forms of collectives that are reported but not replaced, and why; so are those that a later
#: PyTorch adds.
OTHER_FORMS = {
    "all_gather_into_tensor_coalesced": "several tensors are gathered in one collective",
    "reduce_scatter_tensor_coalesced": "several tensors are reduced in one collective",
    "all_reduce_coalesced": "several tensors are reduced in one collective",
    "all_gather_into_tensor_out": "the collective writes into a tensor that it is given",
    "reduce_scatter_tensor_out": "the collective writes into a tensor that it is given",
    "all_reduce_": "the collective works in place",
    "all_reduce_coalesced_": "the collective works in place",
    "broadcast": "no operator of ficco multiplies what is broadcast",
    "broadcast_": "no operator of ficco multiplies what is broadcast",
    "shard_dim_alltoall": "it joins one dimension and cuts another: no operator of ficco does",
    "isend": "a message between two ranks is no collective of the group",
    "irecv": "a message between two ranks is no collective of the group",
    "batch_p2p_ops": "messages between pairs of ranks are no collective of the group",
}
#: Operations that write into their operands, although their schemas do not say so.
_RECEIVE = {"irecv", "batch_p2p_ops"}

_SAME_ORDER = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.alias.default,
    aten.detach.default,
}
_CONVERSIONS = {aten._to_copy.default, aten.to.dtype, torch.ops.prims.convert_element_type.default}
_SPLITS = {aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default}


def value(node: Any) -> FakeTensor | None:
    """The fake tensor that a node was traced with."""
    tensor = node.meta.get("val") if isinstance(node, Node) else None
    return tensor if isinstance(tensor, FakeTensor) else None


def tensor_of(node: Any) -> FakeTensor:
    """The fake tensor of a node that is known to have one."""
    tensor = value(node)
    assert tensor is not None, node
    return tensor


def known(argument: Any) -> Any:
    """The value of an argument that is a number, or a node that computes one."""
    return argument.meta.get("val") if isinstance(argument, Node) else argument


def op_of(node: Node) -> torch._ops.OpOverload:
    """Operation of a node that is one (:func:`is_op`)."""
    assert isinstance(node.target, torch._ops.OpOverload), node
    return node.target


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of an operation by name, including defaults."""
    schema = op_of(node)._schema.arguments
    defaults = {argument.name: argument.default_value for argument in schema}
    passed = {argument.name: value for argument, value in zip(schema, node.args, strict=False)}
    return defaults | passed | node.kwargs


def is_op(node: Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


def collective(node: Node) -> str | None:
    """The name of a functional collective's overload packet; None for other nodes."""
    if not is_op(node):
        return None
    space, _, name = str(op_of(node)._schema.name).partition("::")
    known = space == "_dtensor" and name in OTHER_FORMS
    return name if known or (space in _NAMESPACES and name not in _WAITS) else None


def is_wait(node: Node) -> bool:
    name = str(op_of(node)._schema.name) if is_op(node) else ""
    return name.endswith("c10d_functional::wait_tensor")


def is_size(node: Node) -> bool:
    """Whether a node only reads a size."""
    return is_op(node) and node.target == aten.sym_size.int


# Products.

#: Products by operation: the names of its left and right operands and of its bias.
_PRODUCTS = {
    aten.mm.default: ("self", "mat2", ""),
    aten.matmul.default: ("self", "other", ""),
    aten.addmm.default: ("mat1", "mat2", "self"),
    aten.linear.default: ("input", "weight", "bias"),
    aten._scaled_mm.default: ("self", "mat2", "bias"),
}
if hasattr(aten, "_scaled_mm_v2"):  # not in PyTorch 2.8
    _PRODUCTS[aten._scaled_mm_v2.default] = ("self", "mat2", "bias")

#: How ``_scaled_mm_v2`` names the recipes that operators take (torch.nn.functional.ScalingType).
_RECIPES = {(0, 0): "tensor", (1, 1): "row", (4, 5): "block"}


@dataclass(frozen=True)
class MatrixProduct:
    """One product of a matrix, which may have leading dimensions, and a plain matrix."""

    node: Node
    a: Node
    b: Node
    transposed: bool  #: b is [n, k]
    bias: Node | None = None
    scales: tuple[Node, ...] = ()  #: of a and of b, if these are float8
    fast_accum: bool = False

    @property
    def operands(self) -> tuple[Node, ...]:
        """Operands of the product besides ``a``."""
        own = (*self.scales, *([self.bias] if self.scales and self.bias else ()))
        return (self.b, *own)

    @property
    def columns(self) -> Size:
        return tensor_of(self.b).shape[0 if self.transposed else 1]


def product(node: Any) -> MatrixProduct | str:
    """The product that a node computes, or why ficco has no operator for it."""
    if not isinstance(node, Node) or not is_op(node):
        return f"{_called(node)} is no product"
    if node.target in (aten.bmm.default, aten.baddbmm.default):
        return "bmm multiplies a batch of matrices"
    if node.target not in _PRODUCTS:
        return f"{_called(node)} is no product"
    by_name = arguments(node)
    if by_name.get("beta", 1) != 1 or by_name.get("alpha", 1) != 1:
        return "addmm with beta or alpha other than 1"
    left, right, bias = map(by_name.get, _PRODUCTS[node.target])
    transposed = node.target == aten.linear.default
    scales = _scales(node, by_name) if "scale_a" in by_name else ()
    if isinstance(scales, str):
        return scales
    how = transposed, bias, scales, bool(by_name.get("use_fast_accum"))
    matmul = MatrixProduct(node, left, right, *how)  # type: ignore[arg-type]
    a, b = value(matmul.a), value(matmul.b)
    if a is None or b is None or a.dim() < 2 or b.dim() != 2:
        return f"{_called(node)} of operands that are no matrices"
    return matmul


def _scales(node: Node, by_name: dict[str, Any]) -> tuple[Node, ...] | str:
    """The scales of a product of float8 operands, or why no operator takes them."""
    scales = by_name["scale_a"], by_name["scale_b"]
    if "recipe_a" in by_name:
        recipes = [tuple(map(int, by_name[name])) for name in ("recipe_a", "recipe_b")]
        if [len(each) for each in (*recipes, *scales)] != [1] * 4:
            return "operands with scales of two levels"
        if (pair := (recipes[0][0], recipes[1][0])) not in _RECIPES:
            return f"scales by the recipes {pair[0]} and {pair[1]}"
        swizzled = any(map(int, (*by_name["swizzle_a"], *by_name["swizzle_b"])))
        if swizzled or by_name["contraction_dim"]:
            return "swizzled scales, or another dimension than k is contracted"
        scales = scales[0][0], scales[1][0]
    if by_name.get("scale_result") is not None:
        return "a product with scale_result"
    result = tensor_of(node).dtype
    if str(result).removeprefix("torch.") not in RESULTS:
        return f"a product of float8 operands in {result}"
    if any(tensor_of(scale).dtype != torch.float32 for scale in scales):
        return f"scales of {tensor_of(scales[0]).dtype} and {tensor_of(scales[1]).dtype}"
    return scales


def _called(node: Any) -> str:
    if not isinstance(node, Node):
        return repr(node)
    if node.op in ("output", "placeholder"):
        edge = "the output" if node.op == "output" else "an input"
        return f"{edge} of the graph (compile the parent module if the product is outside)"
    return str(node.target) if is_op(node) else f"{node.op} {node.name}"


# Relayouts: views, copies, permutations and conversions between a collective and a product.


@dataclass(frozen=True)
class Relayout:
    """Nodes that turn one tensor into another with the same values.

    There are several ``nodes`` if a tensor is cut up and joined again; the last is the result.
    """

    source: Node
    nodes: tuple[Node, ...]
    perm: tuple[int, ...] | None = None
    pieces: tuple[int, int, int] | None = None  #: cut dimension, joined dimension, number
    converts: torch.dtype | None = None

    @property
    def result(self) -> Node:
        return self.nodes[-1]

    def forward(self, order: Order) -> Order:
        """The order after the relayout."""
        shape = tensor_of(self.source).shape
        if self.pieces is not None:
            return regrouped(order, shape, *self.pieces)
        return order if self.perm is None else permuted(order, shape, self.perm)

    def backward(self, order: Order) -> Order:
        """The order before the relayout, for one after it."""
        perm, pieces = self.perm, self.pieces
        inverse = Relayout(
            self.result,
            (self.source,),
            None if perm is None else tuple(map(perm.index, range(len(perm)))),
            None if pieces is None else (pieces[1], pieces[0], pieces[2]),
        )
        return inverse.forward(order)


def relayout_to(node: Any) -> Relayout | None:
    """The relayout whose result a node is."""
    after = value(node)
    if after is None or not is_op(node):
        return None
    if node.target == aten.cat.default:
        return _pieces(node)
    source = node.args[0] if node.args else None
    before = value(source)
    if before is None or not isinstance(source, Node):
        return None
    nodes, dims = (node,), before.dim()
    if node.target == aten.view.dtype:  # bytes of float8, for libraries that do not know it
        if before.dtype.itemsize == after.dtype.itemsize:
            return Relayout(source, nodes, converts=after.dtype)
    elif node.target in _CONVERSIONS:
        # Nothing but the dtype may change.
        if before.device == after.device and before.shape == after.shape:
            return Relayout(source, nodes, converts=after.dtype)
    elif node.target in _SAME_ORDER or (is_wait(node) and not collective(source)):
        return Relayout(source, nodes)
    elif _slices_all(node):
        return Relayout(source, nodes)
    elif node.target == aten.copy.default:
        by_name = arguments(node)
        source = by_name["src"]
        before = value(source)
        if before is not None and (before.dtype, before.shape) == (after.dtype, after.shape):
            return Relayout(source, nodes)
    elif node.target == aten.t.default:
        return Relayout(source, nodes, perm=tuple(reversed(range(dims))))
    elif node.target == aten.permute.default:
        return Relayout(source, nodes, perm=tuple(i % dims for i in node.args[1]))
    elif node.target == aten.transpose.int:
        perm = list(range(dims))
        i, j = (d % dims for d in node.args[1:3])
        perm[i], perm[j] = j, i
        return Relayout(source, nodes, perm=tuple(perm))
    return None


def _slices_all(node: Node) -> bool:
    """Whether a node is a slice of the whole tensor, as DTensor writes it for dynamic sizes."""
    if node.target != aten.slice.Tensor:
        return False
    before, after = tensor_of(node.args[0]).shape, tensor_of(node).shape
    return all(same(one, other) for one, other in zip(before, after, strict=True))


def _pieces(cat: Node) -> Relayout | None:
    """The relayout of a cat that joins all pieces of one tensor in order; None for other cats."""
    by_name = arguments(cat)
    parts = by_name["tensors"]
    joined_pieces = [piece for part in parts if (piece := _piece(part)) is not None]
    if not parts or len(joined_pieces) < len(parts):
        return None
    source, cut = joined_pieces[0].source, joined_pieces[0].dim
    shape, length = tensor_of(source).shape, tensor_of(parts[0]).shape[cut]
    if any(piece.source is not source or piece.dim != cut for piece in joined_pieces):
        return None
    lengths = [(tensor_of(part).shape[cut], length) for part in parts]
    starts = [(piece.start(length), i * length) for i, piece in enumerate(joined_pieces)]
    if not all(same(*pair) for pair in (*lengths, *starts, (len(parts) * length, shape[cut]))):
        return None
    between = dict.fromkeys(node for piece in joined_pieces for node in piece.nodes)
    pieces = (cut, by_name["dim"] % len(shape), len(parts))
    return Relayout(source, (*between, cat), pieces=pieces)


class _Piece(NamedTuple):
    """One of several equal pieces of a tensor, cut along a dimension.

    Attributes:
        start: its first index, as a function of the pieces' length.
        nodes: the nodes that cut it.
    """

    source: Node
    dim: int
    start: Callable[[Size], Size]
    nodes: tuple[Node, ...]


def _piece(node: Any) -> _Piece | None:
    """The piece of a tensor that a node is."""
    if not isinstance(node, Node) or node.op != "call_function" or value(node) is None:
        return None
    if node.target == operator.getitem:
        cut, number = node.args
        if not isinstance(cut, Node) or cut.target not in _SPLITS:
            return None
        source = cut.args[0]
        if not isinstance(source, Node) or value(source) is None:
            return None
        dim = arguments(cut)["dim"] % tensor_of(source).dim()
        return _Piece(source, dim, lambda length: number * length, (cut, node))
    if node.target == aten.slice.Tensor:
        by_name = arguments(node)
        if value(by_name["self"]) is None or known(by_name["step"]) != 1:
            return None
        start = known(by_name["start"]) or 0
        dim = by_name["dim"] % tensor_of(by_name["self"]).dim()
        return _Piece(by_name["self"], dim, lambda length: start, (node,))
    return None


def relayouts_from(node: Node) -> Iterator[tuple[Node, Relayout | None]]:
    """The users of a node, each with the relayout that it begins, or None."""
    for user in node.users:
        if is_size(user):
            continue
        ends = [user]
        if user.target in _SPLITS:
            ends = [cat for item in user.users for cat in item.users][:1]
        elif user.target == aten.slice.Tensor and not _slices_all(user):
            ends = list(user.users)[:1]
        relayout = relayout_to(ends[0]) if ends else None
        if relayout is None or relayout.source is not node or user not in relayout.nodes:
            yield user, None
        else:
            yield user, relayout


def source_of(node: Node) -> Node:
    """The node at the beginning of the chain of relayouts that leads to this one."""
    while (relayout := relayout_to(node)) is not None:
        node = relayout.source
    return node


def inner_users(relayout: Relayout) -> list[Node]:
    """Users of a relayout's inner nodes that are not part of it."""
    return [
        user
        for node in relayout.nodes[:-1]
        for user in node.users
        if user not in relayout.nodes and not is_size(user)
    ]


# Writes.


def written(node: Node) -> list[Node]:
    """The tensors that a node may write to: all its inputs, if the node is not known."""
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    if is_op(node) and collective(node) not in _RECEIVE:
        return [
            tensor
            for argument in op_of(node)._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(arguments(node)[argument.name])
            if isinstance(tensor, Node)
        ]
    if node.op == "call_function":
        functional = "functional" in getattr(node.target, "__name__", "")
        module = getattr(node.target, "__module__", "") or ""
        plain = isinstance(node.target, types.BuiltinFunctionType) and module == "_operator"
        if functional or plain or "sym_" in getattr(node.target, "__name__", ""):
            return []
    return [operand for operand in node.all_input_nodes if value(operand) is not None]


def storage(node: Node) -> Node:
    """The node whose memory a view shares."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], Node):
        views = node.target == operator.getitem or node.target in _SAME_ORDER
        if is_op(node) and (returns := op_of(node)._schema.returns):
            views |= returns[0].alias_info is not None
        if not views:
            break
        node = node.args[0]
    return node


def write_between(first: Node, last: Node, tensors: Sequence[Node]) -> Node | None:
    """A node between ``first`` and ``last`` that may write to one of the tensors."""
    held = {storage(node) for node in tensors}
    for node in span(first.next, last):
        if any(storage(target) in held for target in written(node)):
            return node
    return None


def span(first: Node, last: Node | None = None) -> Iterator[Node]:
    """The nodes from one up to another one, or to the end of the graph."""
    while first is not last and first.op != "root":
        yield first
        first = first.next


# Where a node comes from.

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.*)')


def origin(*nodes: Node | None) -> str:
    """The user's line of code that nodes come from: the innermost outside PyTorch."""
    for node in nodes:
        trace = (node.meta.get("stack_trace") or "") if node is not None else ""
        lines = trace.splitlines()
        frames = [(i, frame) for i, text in enumerate(lines) if (frame := _FRAME.search(text))]
        own = [at for at in frames if "/torch/" not in at[1]["file"]]
        if own:
            i, frame = own[-1]
            code = lines[i + 1].strip() if i + 1 < len(lines) else ""
            return f"{Path(frame['file']).name}:{frame['line']} {code}".strip()
    return ""
