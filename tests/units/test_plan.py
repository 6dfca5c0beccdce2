"""Plans of all schedules pass the proof, and the proof refuses broken plans."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from operator import itemgetter
from typing import Any

import pytest
from cases import gathered_bytes
from edits import (
    Edit,
    adds,
    awaits_data,
    change,
    changed,
    clear_first,
    clear_late,
    down,
    edited,
    everywhere,
    idle,
    in_cols,
    in_rows,
    index,
    is_collective,
    is_copy,
    mapped,
    move,
    multiplies,
    on_one_lane,
    refused,
    renamed,
    retires,
    reuse_early,
    sums,
    swap,
    twice,
    wait_first,
    with_buffer,
    without_buffer,
    without_first,
    without_kinds,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ficco.plan import Buffer, LibraryMove, Plan, Reduction, Region, Step, Transfer
from ficco.plan.model import MANY, aligned, paused
from ficco.problems.products import OPERATORS, Problem
from ficco.proof import check
from ficco.schedules import NAMED, Schedule, plans, refusal

PROBLEM = Problem("all_gather_matmul", (16,) * 4, 24, 32, "bfloat16")
SUMMED = replace(PROBLEM, operator="matmul_reduce_scatter")
RETURNED = replace(PROBLEM, operator="matmul_all_reduce")
SENT = Problem.of_blocks("matmul_all_to_all", ((4,) * 4,) * 4, 24, 32, "bfloat16")
TURNED = replace(PROBLEM, operator="all_gather_transposed_matmul")
TWO = replace(PROBLEM, rows=(8, 8))
TAKEN = Problem.of_blocks("all_to_all_matmul", ((4,) * 4,) * 4, 24, 32, "bfloat16")
#: The number of multiplied rows differs by rank.
UNEVEN = Problem.of_blocks(
    "all_to_all_transposed_matmul",
    [[5, 6, 7, 2], [2, 4, 1, 3], [3, 0, 6, 5], [6, 4, 3, 7]],
    *(24, 32, "bfloat16"),
)

KNOBS = (
    *("", "pull", "pieces=3", "pieces=3+2+1,tail=2", "pieces=4,pull,copy=2,compute=2"),
    *("copy=3,compute=2,tail=3", "order=peer,pieces=2", "pull,order=peer,compute=3", "beta"),
    *("pieces=3,tail=2,copy=2,compute=2,beta", "pieces=2,pull,compute=2,beta"),
)


def build(name: str, problem: Problem = PROBLEM, cap: int | None = None) -> list[Plan]:
    return plans(problem, Schedule.parse(name), cap)


@cache
def proven(name: str, problem: Problem = PROBLEM) -> list[Plan]:
    """Return plans that pass the proof; tests edit copies of them."""
    all_plans = build(name, problem)
    check(all_plans)
    return all_plans


def served(problem: Problem) -> list[str]:
    """Return names with knobs of the schedules that serve a problem."""
    names = []
    for base in NAMED:
        for knobs in KNOBS:
            name = f"{base}:{knobs}".rstrip(":")
            try:
                if not refusal(problem, Schedule.parse(name)):
                    names.append(name)
            except ValueError:  # incompatible knobs
                continue
    return [*names, "serial:collective"]


def problem_with(operator: str, rows: list[int], turn: int = 1) -> Problem:
    """Return a problem with these rows; an all-to-all has an asymmetric table of them."""
    if not OPERATORS[operator].blocks:
        return Problem(operator, tuple(rows), 24, 32, "bfloat16")
    table = [[rows[(i * turn + j) % len(rows)] for j in range(len(rows))] for i in range(len(rows))]
    return Problem.of_blocks(operator, table, 24, 32, "bfloat16")


@pytest.mark.parametrize(
    ("rows", "n", "k", "message"),
    [
        ((4, 2**63), 8, 8, "rows: required a size of at most"),
        ((4, 4), 2**63, 8, "n: required a size of at most"),
        ((4, 4), 8, -1, "k: required a size of at least 0"),
        ((1,) * 1025, 8, 8, "world: required at most 1024 ranks, got 1025"),
    ],
)
def test_sizes_beyond_all_hosts_are_refused(rows: Any, n: int, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Problem("all_gather_matmul", rows, n, k, "float32")


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    rows = draw(st.lists(st.integers(0, 40), min_size=1, max_size=8))
    base = problem_with(draw(st.sampled_from(list(OPERATORS))), rows, draw(st.integers(0, 3)))
    n, k = draw(st.sampled_from([0, 1, 9, 40])), draw(st.sampled_from([0, 1, 7, 70]))
    dtype = draw(st.sampled_from(["bfloat16", "float32"]))
    flags = (False, False) if base.kind.scatters else draw(st.tuples(st.booleans(), st.booleans()))
    return replace(base, n=n, k=k, dtype=dtype, return_gathered=flags[0], symmetric=flags[1])


@settings(deadline=None, max_examples=250)
@given(problem=problems(), data=st.data(), share=st.sampled_from([None, 1.0, 0.5, 0.25]))
def test_plans_pass_the_proof(problem: Problem, data: st.DataObject, share: float | None) -> None:
    capped = share is not None and not problem.kind.scatters
    cap = int((share or 0) * gathered_bytes(problem)) if capped else None
    try:
        all_plans = build(data.draw(st.sampled_from(served(problem))), problem, cap)
    except ValueError as error:
        assert cap is not None and "workspace_bytes: required at least" in str(error)
        return
    check(all_plans)
    for plan in all_plans:
        published = plan.slot_bytes - plan.offsets.get("publish", plan.slot_bytes)
        assert cap is None or plan.slot_bytes <= aligned(cap) + published


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_schedule_serves_every_operator(operator: str) -> None:
    """Ranks have many, few or no rows. Sums are rounded once unless the result accumulates."""
    problem = problem_with(operator, [40, 0, 1, 9])
    for name in served(problem):
        all_plans = build(name, problem)
        check(all_plans)
        if problem.kind.sums:
            products = [p for plan in all_plans for step in plan.steps for p in step.products]
            assert any(p.terms for p in products) == Schedule.parse(name).beta, name


# Broken plans: an edit of the steps of rank 0 or 3.


def adds_elsewhere(step: Step) -> bool:
    return any(product.addend for product in step.products)


def makes_partial(step: Step) -> bool:
    return any(product.out.buffer == "partial" for product in step.products)


def sends_back(step: Step) -> bool:
    return is_copy(step) and step.label.startswith("sum")


def sends_on(step: Step) -> bool:
    return step.copy is not None and step.copy.src.buffer == "staging"


def release_later(steps: list[Step]) -> None:
    """Release the slot to one peer in a separate step."""
    *rest, last = steps[-1].posts
    steps[-1] = steps[-1]._replace(posts=tuple(rest))
    steps.append(Step(None, "sync", "late", posts=(last,)))


def round_first(steps: list[Step]) -> None:
    """Round the sum after the first product."""
    last = steps.pop(index(steps, "sum>out"))
    steps.insert(index(steps, multiplies) + 1, last)


def sum_a_placed_block(steps: list[Step]) -> None:
    i = index(steps, "staging>out")
    moved = steps[i].work
    assert isinstance(moved, Transfer)
    reduction = Reduction((moved.src,), (moved.terms,), moved.dst)
    steps[i] = steps[i]._replace(work=reduction)


backwards, fewer = itemgetter(slice(None, None, -1)), itemgetter(slice(-1))


def last_twice(values: Any) -> Any:
    return *values, values[-1]


def narrower(part: Region) -> Region:
    return part._replace(col_stop=part.col_stop - 1)


def in_first(edit: Callable[[Region], Region]) -> Callable[[Any], Any]:
    """Return an edit of the first part."""
    return lambda parts: (edit(parts[0]), *parts[1:])


def all_in(**fields: Any) -> Callable[[Any], Any]:
    """Return an edit that replaces fields of all parts."""
    return lambda parts: tuple(part._replace(**fields) for part in parts)


FUSED, COLUMNS, BETA = "hetero-fused-1d", "uniform-fused-2d", "hetero-fused-1d:beta"
UNFUSED, TWO_LANES = "hetero-unfused-1d", "hetero-unfused-1d:pieces=2,compute=2"
LOST, UNWRITTEN, UNMADE = "another piece", "nobody has written", "elements of out are written"
EARLY, IN_USE, UNSUMMED = "before it is written", "may still use a slot", "leaves out the product"
WHOLE, TAKES = "something else than the whole", "takes rows of another block"
UNKNOWN = "holds no work that engines know"
AGAIN = "adds rows of A that another product adds"
#: The first 31 of 32 terms: rows of B, columns of A.
FEWER = {"b": {"row_stop": 31}, "a": {"col_stop": 31}}
OWN = {"buffer": "partial"}
#: By problem and schedule: name of the fault, edit, and error of the proof.
BROKEN: dict[tuple[Problem, str], dict[str, tuple[Edit, str]]] = {
    (PROBLEM, "growing"): {
        "no wait": (change(awaits_data, waits=()), "never waited for"),
        "no post": (change(is_copy, posts=()), "never posted"),
        "a doubled signal": (change(is_copy, posts=twice), "used twice"),
        "a dirty word": (change(retires, clears=without_first), "stays dirty"),
        "an early release": (change(retires, after=()), IN_USE),
        "two releases": (release_later, "every peer in one step"),
        "slots acquired late": (move("acquire", retires, "waits", "clears"), "not handed it over"),
        "a word cleared early": (clear_first, "may be cleared before"),
        "a word cleared late": (clear_late, "may be posted before it is cleared"),
        "one word for two": (
            change(is_copy, posts=lambda posts: tuple(post._replace(slot=1) for post in posts)),
            "shares its word",
        ),
        "no copy": (idle(is_copy), f"reads what {UNWRITTEN}"),
        "a copy outside the buffer": (change(is_copy, dst=down(999)), "leaves the buffer"),
        "a copy outside the columns": (change(is_copy, dst=in_cols(8, 40)), "leaves the buffer"),
        "a copy for others": (change(is_copy, src={"rank": 1}), "between the wrong ranks"),
        "a copy that shrinks": (change(is_copy, dst={"row_stop": 17}), "different sizes"),
        "no such buffer": (change(is_copy, src={"buffer": "c"}), "no buffer"),
        "no such rank": (change(is_copy, dst={"rank": 9}), "no rank"),
        "no such lane": (change(is_copy, lane="copy"), "there is no lane"),
        "no such operation": (change(is_copy, work=object()), UNKNOWN),
        "no such mover": (change(is_copy, mover="hand"), UNKNOWN),
        "no such step": (change(retires, after=(99,)), "not there"),
        "a step without its product": (change(awaits_data, products=()), UNKNOWN),
        "a product written twice": (change(awaits_data, products=twice), "twice"),
        "a product of products": (change(awaits_data, a={"buffer": "out"}), "in the wrong buffers"),
        "a product at a peer": (change(multiplies, a={"rank": 2}, out={"rank": 2}), "at a peer"),
        "own rows elsewhere": (change(multiplies, out=in_rows(7, 23)), "into a peer's"),
        "an empty batch": (change(multiplies, batch=0), "do not fit"),
        "part of the columns": (change(multiplies, out=in_cols(0, 23), b=in_cols(0, 23)), UNMADE),
        "fewer columns than b": (change(multiplies, out={"col_stop": 23}), "do not fit"),
        "fewer rows of b": (change(multiplies, b={"row_stop": 31}), "do not fit"),
        "other columns of b": (change(multiplies, b=in_cols(1, 25)), "do not fit"),
        "b of a peer": (change(multiplies, b={"rank": 2}), "at a peer"),
        "A for b": (change(multiplies, b={"buffer": "a"}), "wrong buf"),
        "A transposed": (change(awaits_data, transposed=True), "the wrong way round"),
    },
    (PROBLEM, "growing:pull"): {
        "memory out of reach": (change(is_copy, src={"buffer": "a"}), "not symmetric"),
    },
    (PROBLEM, f"{FUSED}:pull"): {
        "a pull before the peer is ready": (move(is_copy, "peers have read", "waits"), EARLY)
    },
    (PROBLEM, UNFUSED): {
        "landings that overlap": (change(lambda step: ".1>" in step.label, dst=down(-1)), UNWRITTEN)
    },
    (PROBLEM, FUSED): {
        "other rows": (change(is_copy, src=down(1)), "leaves out copied rows"),
        "a sum without its last term": (change(awaits_data, **FEWER), "does not cover all of k"),
    },
    (PROBLEM, COLUMNS): {
        "part of k left out": (idle(lambda step: " 2.2" in step.label), "leaves out part of k"),
        "a term that replaces the sum": (change(adds, accumulate=False), "is written twice"),
        "a term that comes twice": (
            change(adds, b=in_rows(0, 8), a=in_cols(0, 8)),
            f"adds the same part of k twice|reads {LOST}",
        ),
        "a sum without its first term": (change(multiplies, accumulate=True), UNWRITTEN),
        "sums in a dtype that rounds": (change(adds, out={"buffer": "out"}), "has been rounded"),
        "sums rounded too early": (round_first, "rounds before the last term"),
    },
    (PROBLEM, "uniform-unfused-2d"): {
        "sums of other rows": (swap("sum>out", "dst"), "puts rows where others belong")
    },
    (PROBLEM, "serial:collective"): {
        "another name": (change(is_collective, label="other"), "other collectives"),
        "signals": (
            change(is_collective, posts=lambda posts: proven("growing")[1].steps[-1].posts),
            "mixes signals",
        ),
    },
    (SUMMED, FUSED): {
        "sent before it is computed": (change(is_copy, after=()), EARLY),
        "a product in other rows": (
            change(multiplies, out={"row": 1}, a={"row_stop": 3}),
            "do not fit|a peer's|leaves the buffer",
        ),
        "part of k": (change(multiplies, **FEWER), "multiplies part of k"),
        "sums of other rows": (change(sums, parts=in_first(down(1))), f"{LOST}|do not belong"),
        "sums of other sizes": (change(sums, parts=in_first(narrower)), "different sizes"),
        "a sum at a peer": (change(sums, parts=all_in(rank=2)), "sums in the wrong buffers"),
        "a sum of results": (change(sums, parts=all_in(buffer="out")), "in the wrong buffers"),
        "a sum of nothing": (change(sums, parts=(), terms=()), "whose products it sums"),
        "a part without its term": (change(sums, terms=fewer), "whose products it sums"),
        "a term twice": (change(sums, parts=last_twice, terms=last_twice), "rank twice"),
        "a term missing": (change(sums, parts=fewer, terms=fewer), UNSUMMED),
        "terms out of order": (change(sums, parts=backwards, terms=backwards), "in the order of"),
        "terms under other names": (change(sums, parts=backwards), "products of other ranks"),
    },
    (SUMMED, COLUMNS): {
        "other columns of b": (change(multiplies, out=in_cols(1, 7), b=in_cols(1, 7)), UNWRITTEN),
    },
    (SUMMED, BETA): {
        "the own product added to less": (change(adds, terms=6 << 1), "adds itself to"),
        "the own product added twice": (change(adds, products=twice), "other ranks than it says"),
        "the own product added to itself": (change(adds, terms=15), "sum that it is in"),
        "the own product added early": (change(adds, after=()), "overwritten by an unordered"),
        "the own product added to no terms": (change(adds, terms=0), "not say whose products it"),
    },
    (SUMMED, "ring"): {"forwarded before it is added": (change(sends_on, after=()), EARLY)},
    (SUMMED, "ring:pieces=1"): {
        "added at the end to other rows": (change(adds_elsewhere, addend=down(8)), LOST),
        "added at the end to less": (change(adds_elsewhere, addend=in_rows(0, 15)), "does not fit"),
        "added to partial at the end": (change(adds_elsewhere, addend=OWN), "to the wrong buffer"),
        "added to two at the end": (change(adds_elsewhere, accumulate=True), "does not fit"),
    },
    (SUMMED, "one-shot"): {
        "staging of a peer": (change(sums, parts=all_in(buffer="staging")), "names no buffer")
    },
    (RETURNED, "one-shot"): {
        "read before it arrives": (move(sums, retires, "waits"), "may read before it is written"),
        "a peer signalled too early": (move("has read", "acquire, tell 0", "posts"), IN_USE),
    },
    (RETURNED, "two-shot"): {
        "a slot released while it is read": (change(retires, after=()), IN_USE),
    },
    (SENT, "serial"): {
        "blocks in the wrong places": (swap("staging>out", "dst"), f"reads {LOST}"),
        "a sum where blocks are placed": (sum_a_placed_block, "whose products it sums"),
    },
    (SENT, FUSED): {
        "a peer's rows as own rows": (change(makes_partial, out={"buffer": "out"}), TAKES),
        "a copy without a name": (change(is_copy, terms=0), "does not say whose products"),
    },
    (TAKEN, FUSED): {
        "A with terms": (change(is_copy, terms=1), "or says so of an operand"),
        "terms of A": (change(multiplies, terms=1), "to what another rank made"),
    },
    (TURNED, "growing"): {
        "a piece left out": (idle(awaits_data), "rounds before the last term"),
        "not transposed": (change(awaits_data, transposed=False), "the wrong way round"),
        "a batch": (change(awaits_data, batch=2), "do not fit"),
    },
    (TURNED, UNFUSED): {"rows of b of another piece": (swap(awaits_data, "b"), f"reads {LOST}")},
    (TURNED, COLUMNS): {"columns in other rows": (swap(awaits_data, "out"), f"reads {LOST}")},
    (TURNED, TWO_LANES): {"sums in no order": (change(adds, lane="compute1"), "by an unordered")},
    (UNEVEN, UNFUSED): {"rows of b next to its own": (change(awaits_data, b=down(1)), AGAIN)},
}


@pytest.mark.parametrize(
    ("problem", "name", "edit", "words"),
    [
        pytest.param(*key, edit, words, id=f"{key[0].operator}-{key[1]}-{fault}")
        for key, faults in BROKEN.items()
        for fault, (edit, words) in faults.items()
    ],
)
def test_broken_plans_are_refused(problem: Problem, name: str, edit: Edit, words: str) -> None:
    for rank in (0, 3):
        refused(edited(proven(name, problem), rank, edit), words)


# Broken plans of several ranks, and plans of other problems.

Plans = list[Plan]
PAIR, THREE = replace(PROBLEM, rows=(16,) * 2), replace(SUMMED, rows=(16,) * 3)
TRIO = Problem.of_blocks("all_to_all_matmul", ((4,) * 3,) * 3, 24, 32, "bfloat16")
SHORT = Problem("all_gather_matmul", (4, 4), 3, 8, "float32")


def on_all(edit: Edit) -> Callable[[Plans], Plans]:
    return partial(everywhere, edit=edit)


def buffer(name: str, **fields: Any) -> Callable[[Plans], Plans]:
    """Return an edit that replaces fields of a buffer on all ranks."""
    return lambda intact: [with_buffer(plan, name, **fields) for plan in intact]


def travelling_in(dtype: str) -> Callable[[Plans], Plans]:
    """Return an edit that transfers products in another dtype."""
    return lambda intact: buffer("publish", dtype=dtype)(buffer("staging", dtype=dtype)(intact))


def on_each(edit: Callable[[Plan], Plan]) -> Callable[[Plans], Plans]:
    return lambda intact: list(map(edit, intact))


def on_one(edit: Callable[[Plan], Plan]) -> Callable[[Plans], Plans]:
    """Return an edit of the plan of rank 1."""
    return lambda intact: [intact[0], edit(intact[1]), *intact[2:]]


def signal(rank: int, suits: Callable[[Step], Any], **fields: Any) -> Callable[[Plans], Plans]:
    """Return an edit of all uses of the signal of a rank's first step that ``suits``."""

    def rename(intact: Plans) -> Plans:
        steps = intact[rank].steps
        return renamed(intact, steps[index(steps, suits)].posts[0], **fields)

    return rename


def used_by_another_rank(role: str) -> Callable[[Plans], Plans]:
    """Return an edit that moves a wait or a clear from rank 2 to rank 3."""

    def swap_roles(intact: Plans) -> Plans:
        signals = next(getattr(step, role) for step in intact[2].steps if getattr(step, role))
        drop = change(lambda step: getattr(step, role) == signals, **{role: signals[1:]})
        take = change(retires, **{role: lambda own: (*own, signals[0])})
        return edited(edited(intact, 2, drop), 3, take)

    return swap_roles


def cleared_for_nothing(intact: Plans) -> Plans:
    signal = intact[2].steps[-1].clears[0]
    return mapped(intact, lambda s: None if s == signal else s, roles=("waits", "posts"))


def sums_return_early(intact: Plans) -> Plans:
    """Return sums into rows that a reduction of other products still reads."""

    def edit(step: Step) -> Step:
        if sends_back(step):
            return changed(step, dst=down(-16))
        return changed(step, src=down(-16)) if step.op == "place" else step

    return [replace(plan, steps=tuple(map(edit, plan.steps))) for plan in intact]


def another_rank_publishes(intact: Plans) -> Plans:
    symmetric = replace(PROBLEM, symmetric=True)
    intact = buffer("a", symmetric=True)([replace(plan, problem=symmetric) for plan in intact])
    check(intact)
    return edited(intact, 0, change("publish", src={"rank": 1}))


def pieces_of_a_ring_swapped(intact: Plans) -> Plans:
    """Swap the destinations of two pieces; the next rank waits for both pieces."""

    def wait_for_both(steps: list[Step]) -> None:
        i, j, *_ = (i for i, step in enumerate(steps) if adds(step))
        steps[i] = steps[i]._replace(waits=steps[i].waits + steps[j].waits)
        steps[j] = steps[j]._replace(waits=())

    intact = edited(intact, 1, wait_for_both)
    check(intact)
    return edited(intact, 0, swap(is_copy, "dst"))


def no_result(plan: Plan) -> Plan:
    steps = tuple(step for step in plan.steps if not step.products)
    return without_buffer(replace(plan, steps=steps), "out")


def own_memory_as_shared(intact: Plans) -> Plans:
    (plan,) = intact
    a = plan.steps[0].products[0].a
    extra = Step(Transfer(a, a._replace(buffer="staging")), "compute0", "in")
    staging = Buffer("staging", "A", "bfloat16", ((16, 32),), "slot")
    return [replace(plan, steps=(*plan.steps, extra), buffers=(*plan.buffers, staging))]


def landed_rows_sent_on(intact: Plans) -> Plans:
    """Rank 1 forwards rows from rank 0 to rank 2, instead of the rows of rank 0 for rank 2."""

    def send_on(steps: list[Step]) -> None:
        own, acquire, send, other, product, *rest, retire = steps
        arrived = Region("staging", 1, 0, 4, 0, 32)
        forward = Transfer(arrived, arrived._replace(rank=2))
        extra = Step(forward, "compute0", "0.0>2", after=(1,))
        send = send._replace(lane="compute0")
        retire = retire._replace(after=(6, 2))
        steps[:] = [own, acquire, other, product, extra, send, *rest, retire]

    return edited(edited(intact, 0, idle("0.0>2")), 1, send_on)


def rows_moved_to_where_they_are_read(intact: Plans) -> Plans:
    def move_down(steps: list[Step]) -> None:
        i = index(steps, awaits_data)
        (product,) = steps[i].products
        lower = product.a._replace(row=4, row_stop=12)
        moved = Step(Transfer(product.a, lower), "compute0", "aside", steps[i].waits)
        steps[i] = changed(steps[i], waits=(), a=lower)
        steps.insert(i, moved)
        steps[-1] = steps[-1]._replace(after=tuple(j + (j >= i) for j in steps[-1].after))

    return edited(buffer("staging", shapes=((12, 32),) * 2)(intact), 1, move_down)


def rows_written_twice(intact: Plans) -> Plans:
    """Write rows twice and leave out as many rows."""

    def write_twice(steps: list[Step]) -> None:
        i, j = (i for i, step in enumerate(steps) if multiplies(step))
        parts = [
            changed(steps[n], a=in_rows(*bounds), out=in_rows(*bounds)).products[0]
            for n, bounds in ((i, (0, 4)), (j, (0, 2)), (j, (2, 4)))
        ]
        steps[i] = changed(steps[i], products=(parts[0],))
        steps[j] = changed(steps[j], products=tuple(parts[1:]))

    return edited(intact, 0, write_twice)


def sums_exchanged_aside(plan: Plan) -> Plan:
    """Exchange sums out of place although all ranks receive them."""
    product, exchange = plan.steps
    partial = Buffer("partial", "A @ B", "bfloat16", ((64, 24),) * 4, "local", leaves=True)
    product = changed(product, out={"buffer": "partial"})
    exchange = changed(exchange, src={"buffer": "partial"})
    return replace(plan, steps=(product, exchange), buffers=(*plan.buffers, partial))


def sums_exchanged_in_place(plan: Plan) -> Plan:
    """Exchange sums in place although one rank receives them."""
    product, exchange = plan.steps
    out = Region("out", plan.rank, 0, plan.shape("out")[0], 0, plan.shape("out")[1])
    product = changed(product, a={"row_stop": out.rows}, out=out)
    if not out.rows:
        product = product._replace(work=None)
    return replace(plan, steps=(product, exchange._replace(work=LibraryMove(out, out))))


def half_exchanged(plan: Plan) -> Plan:
    exchange, *rest = plan.steps
    assert isinstance(exchange.work, LibraryMove)
    half = Buffer("half", "A", "bfloat16", ((4, 32),) * 2, "local", leaves=True)
    rows = exchange.work.src._replace(row_stop=4)
    copied = rows._replace(buffer="half")
    place = Step(Transfer(rows, copied), exchange.lane, "half")
    rest = [step._replace(after=tuple(i + 1 for i in step.after)) for step in rest]
    steps = place, changed(exchange, src=copied), *rest
    return replace(plan, steps=steps, buffers=(*plan.buffers, half))


UNBEGUN = "may not have begun"
QUEUE, OTHER, SPECIFIED = "hardware queue", "something else", "not those that are specified"
PULLED, SYMMETRIC = f"{FUSED}:pull", replace(PROBLEM, symmetric=True)
BROKEN_ON_SEVERAL_RANKS: list[tuple[Problem, str, Callable[[Plans], Plans], str]] = [
    # All signals of a kind are missing.
    (SYMMETRIC, PULLED, without_kinds("valid"), UNBEGUN),
    (SYMMETRIC, PULLED, without_kinds("valid", "done"), UNBEGUN),
    (SYMMETRIC, FUSED, without_kinds("ready"), EARLY),
    (RETURNED, FUSED, without_kinds("summed"), EARLY),
    # All uses of a signal are wrong.
    (PROBLEM, "growing", signal(1, is_copy, last=17), "out copied rows"),
    (PROBLEM, "growing", signal(1, is_copy, word=9999), "outside the pads"),
    (PROBLEM, "growing", signal(1, is_copy, word=1), "used twice"),
    (PROBLEM, "growing", signal(1, is_copy, kind="released"), "rests at another value"),
    (PROBLEM, "growing", signal(1, is_copy, poster=2), "another rank than it says"),
    (SUMMED, "ring:pieces=1", signal(3, sends_on, first=0, last=16), LOST),
    (PROBLEM, "growing", used_by_another_rank("waits"), "another rank than it says"),
    (PROBLEM, "growing", used_by_another_rank("clears"), "another rank than it says"),
    (PROBLEM, "growing", cleared_for_nothing, "cleared, and nobody waits for it"),
    # Circles, and circles only in a single hardware queue.
    (PAIR, "shard-overlap", on_all(wait_first), QUEUE),
    (PAIR, "shard-overlap", on_all(on_one_lane), "circle"),
    # Rows in the wrong places.
    (PROBLEM, "growing:pull", another_rank_publishes, "puts rows where others belong"),
    (replace(RETURNED, rows=(16,) * 2), FUSED, sums_return_early, LOST),
    (THREE, "ring:pieces=2", pieces_of_a_ring_swapped, f"adds to {LOST}"),
    (replace(PROBLEM, rows=(16,)), "growing", own_memory_as_shared, "without a signal"),
    (TRIO, "shard-overlap", landed_rows_sent_on, "passes on what is for others"),
    (TWO, "shard-overlap", rows_moved_to_where_they_are_read, "moves to where it still reads"),
    (SHORT, "uniform-fused-2d:pieces=2", rows_written_twice, "12 of 24 elements of out"),
    # Collectives move whole operands, in place if all ranks receive the sums.
    (RETURNED, "serial:collective", on_each(sums_exchanged_aside), WHOLE),
    (replace(SUMMED, rows=(8, 0)), "serial:collective", on_each(sums_exchanged_in_place), WHOLE),
    (TWO, "serial:collective", on_each(half_exchanged), WHOLE),
    # Ranks have the same buffers and list all buffers in use.
    (TWO, "shard-overlap", on_one(no_result), "rank 1 lacks operands or results"),
    (PROBLEM, COLUMNS, on_one(lambda plan: without_buffer(plan, "sum")), "leaves the buffer"),
    *(
        (SUMMED, PULLED, on_one(edit), words)
        for edit, words in (
            (lambda plan: without_buffer(plan, "publish"), OTHER),
            (lambda plan: with_buffer(plan, "staging", shapes=((99, 24),) * 4), OTHER),
            (lambda plan: with_buffer(plan, "staging", dtype="float16"), "another buffer staging"),
            (lambda plan: with_buffer(plan, "b", name="c"), SPECIFIED),
            (lambda plan: replace(plan, buffers=plan.buffers + plan.buffers[:1]), "of one name"),
        )
    ),
    # Fields of buffers agree with their steps.
    *(
        (SUMMED, PULLED, buffer(name, **fields), words)
        for name, fields, words in (
            ("a", {"dtype": "float16"}, SPECIFIED),
            ("out", {"shapes": ((15, 24),) * 4}, SPECIFIED),
            ("staging", {"shapes": ((48, 24),) * 3}, "a shape for each rank"),
            ("staging", {"shapes": ((48, 24),) * 3 + ((48, 25),)}, "no buffers such as staging"),
            ("staging", {"holds": "A"}, "between the wrong buffers"),
            ("staging", {"dtype": "float32"}, "between the wrong buffers"),
            ("publish", {"memory": "local"}, "not symmetric"),
            ("publish", {"memory": "local", "symmetric": True}, "no buffers such as publish"),
            ("publish", {"memory": "private"}, "no buffers such as publish"),
            ("publish", {"layout": "tiles"}, "no buffers such as publish"),
            ("publish", {"first": (0,)}, "for each rank"),
            ("publish", {"leaves": False}, "in the wrong buffers"),
        )
    ),
    (SUMMED, PULLED, travelling_in("float16"), "rounds what out does not"),
    # Each rank has a plan of its own, all of one schedule.
    (PROBLEM, "growing", lambda intact: [intact[0], *intact[:3]], OTHER),
    (PROBLEM, "growing", lambda intact: [*intact[:3], proven("shrinking")[3]], OTHER),
    (PROBLEM, "growing", lambda intact: intact[:3], "3 plans for 4 ranks"),
    (PROBLEM, "growing", lambda intact: [], "no plans"),
]


@pytest.mark.parametrize(("problem", "name", "edit", "words"), BROKEN_ON_SEVERAL_RANKS)
def test_plans_broken_on_several_ranks(problem: Problem, name: str, edit: Any, words: str) -> None:
    refused(edit(proven(name, problem)), words)


def test_early_reuse_of_a_stage_is_refused() -> None:
    all_plans = build("hetero-fused-1d", cap=gathered_bytes(PROBLEM) // 3)
    assert 0 < all_plans[0].stages < 4
    check(all_plans)
    refused(edited(all_plans, 1, reuse_early), "overwrites|may still be read|unordered")


@pytest.mark.parametrize("packs", [False, True])
def test_packed_columns_are_read_with_the_packed_sizes(packs: bool) -> None:
    all_plans = plans(TWO, Schedule.parse("uniform-fused-2d:pieces=2"), packs_columns=packs)
    check(all_plans)

    def halves(steps: list[Step]) -> None:
        i = index(steps, awaits_data)
        (product,) = steps[i].products
        a, b = product.a, product.b
        first = product._replace(a=a._replace(col_stop=8), b=b._replace(row_stop=8))
        second = product._replace(a=a._replace(col=8), b=b._replace(row=8), accumulate=True)
        steps[i] = changed(steps[i], products=(first, second))

    broken = edited(all_plans, 0, halves)
    if packs:
        refused(broken, "cuts packed columns otherwise")
    else:
        check(broken)


@pytest.mark.parametrize("operator", OPERATORS)
def test_collectives_move_whole_operands(operator: str) -> None:
    all_plans = proven("serial:collective", problem_with(operator, [3, 5, 4]))
    for end in ("src", "dst"):
        less = change(is_collective, **{end: {"row_stop": lambda stop: stop - 1}})
        refused(edited(all_plans, 1, less), WHOLE)
    refused(edited(all_plans, 1, list.reverse), f"{UNWRITTEN}|{EARLY}|of a rank")


@pytest.mark.parametrize(
    ("operator", "name", "stages"),
    [
        ("all_gather_matmul", "uniform-unfused-1d", 4),
        ("matmul_reduce_scatter", "ring:pieces=24", 0),
    ],
)
def test_24_ranks_with_24_pieces_are_proven(operator: str, name: str, stages: int) -> None:
    problem = Problem(operator, (1536,) * 24, 512, 1536, "bfloat16")
    all_plans = build(name, problem, stages * 64 * problem.k * problem.itemsize or None)
    check(all_plans)
    assert all_plans[0].stages == stages


@pytest.mark.parametrize(("count", "generation"), [(MANY + 1, 2), (100, 0)])
def test_only_many_new_objects_move_to_the_oldest_generation(count: int, generation: int) -> None:
    gc.collect()
    with paused():
        assert not gc.isenabled()
        objects = [[] for _ in range(count)]
        last = objects[-1]
    assert gc.isenabled()
    assert any(value is last for value in gc.get_objects(generation))
    gc.freeze()  # objects frozen by a caller stay frozen
    try:
        frozen = gc.get_freeze_count()
        with paused():
            objects += [[] for _ in range(MANY + 1)]
        assert gc.get_freeze_count() == frozen
    finally:
        gc.unfreeze()
