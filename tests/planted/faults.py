"""Faults for planting: each is one mistake of one to three lines, and no two share a part."""

from __future__ import annotations

from typing import NamedTuple

#: The marks of ``make test`` and ``make test-slow`` together.
MARKS = "not gpu and not multigpu and not clients"


class Fault(NamedTuple):
    """A text in a file, and the wrong text that replaces it.

    Attributes:
        why: the wrong behaviour.
        tests: tests that are likely to find the fault and run first; removed tests are skipped.
        old: the replaced text, which occurs in the file once.
    """

    name: str
    path: str
    why: str
    tests: tuple[str, ...]
    old: str
    new: str

    def applied(self, text: str) -> str:
        """The text of the file with the fault."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.name}: required once in {self.path}, found {count} times: {self.old!r}; "
                "adapt the fault to the current code"
            )
        return text.replace(self.old, self.new)


FAULTS = (
    Fault(
        "wrong-offset",
        "ficco/schedules/scatter.py",
        "blocks land in staging after a gap of the rank's own rows",
        ("plan.py::test_every_schedule_serves_every_operator",),
        "self.staging, self.staged(dst)[0][src, owner]",
        "self.staging, self.staged(dst)[0][src, owner] + self.problem.block(dst, dst)",
    ),
    Fault(
        "lost-signal",
        "ficco/schedules/gather.py",
        "a rank without rows does not signal to its peers that its call has begun",
        ("plan.py::test_every_schedule_serves_every_operator", "contract.py::test_forward"),
        "return self.schedule.pull or not self.gives(src, dst)",
        "return self.schedule.pull",
    ),
    Fault(
        "piece-boundary",
        "ficco/schedules/groups.py",
        "rows after the last whole granule belong to no piece",
        ("schedules.py::test_cuts_cover_a_length_once",),
        "    bounds[-1] = length\n",
        "    bounds[-1] = max(bounds)\n",
    ),
    Fault(
        "wrong-rail",
        "ficco/problems/specification.py",
        "ranks of hosts with more ranks than there are hosts exchange with the wrong peers",
        (
            "hosts.py::test_plans_over_hosts_are_proven",
            "contract.py::test_over_hosts",
        ),
        "return host % self.hosts * self.local_world + rank % self.local_world",
        "return host % self.hosts * self.local_world + rank % self.hosts",
    ),
    Fault(
        "lossy-choice",
        "ficco/heuristics/model.py",
        "a schedule that loses to serial in one mode is chosen if it gains in another",
        ("model",),
        "harmless = [p for p in overlapped if min(gains(p)) >= least_gain]",
        "harmless = [p for p in overlapped if max(gains(p)) >= least_gain]",
    ),
    Fault(
        "repeated-size",
        "ficco/machine/files.py",
        "a curve of a machine file may have two values for one size",
        ("machine.py::test_a_damaged_file_names_the_place", "machine"),
        "if points and x <= points[-1][0]:",
        "if points and x < points[-1][0]:",
    ),
    Fault(
        "nameless-rank",
        "ficco/errors.py",
        "the error of a failed peer does not name the rank that failed",
        (
            "errors.py::test_exception_tree",
            "faults.py::test_a_rank_that_fails_alone_is_named_at_once",
        ),
        "f\"rank {rank} failed: {why.rstrip('.')}\" for rank, why in",
        "f\"a rank failed: {why.rstrip('.')}\" for rank, why in",
    ),
    Fault(
        "early-signal",
        "ficco/dma/cpu.py",
        "the signal of a copy is posted while the copy runs",
        (
            "contract.py::test_forward",
            "cpu_engine.py::test_a_timed_call_says_when_its_steps_ran",
        ),
        "            move(dst(call), src(call))\n",
        "            threading.Thread(target=move, args=(dst(call), src(call))).start()\n",
    ),
    Fault(
        "early-release",
        "ficco/dma/gpu.py",
        "slots are handed to the peers before the products of the call have ended",
        ("hip.py::test_jittered", "hip.py::test_one_queue_is_late"),
        "        state.over.record(stream)\n        state.over.hold(end)\n",
        "        state.over.record(stream)\n",
    ),
    Fault(
        "wrong-host",
        "ficco/dma/host.py",
        "errors name the host of the waiting rank, not the host of its peer",
        ("hosts_streams.py::test_the_word_of_a_lane_tells_its_step_and_peer", "patience"),
        'return "" if rank is None or self.count == 1 else self.names[rank]',
        'return "" if rank is None or self.count == 1 else self.names[self.first]',
    ),
    Fault(
        "stale-slot",
        "ficco/runtime/workspace.py",
        "calls continue to use a slot that was freed when a larger slot was allocated",
        ("workspace.py::test_ranks_may_remember_other_kinds_of_calls",),
        "        for cached in self.programs.values():\n            cached.forget(slot)\n",
        "",
    ),
    Fault(
        "swapped-scale",
        "ficco/schedules/gather.py",
        "float8 rows from a peer are multiplied by this rank's scale",
        ("contract.py::test_forward",),
        "factors = world.factors(me, unit.peer, gathered) if landed else None",
        "factors = world.factors(me, me, gathered) if landed else None",
    ),
    Fault(
        "missing-gradient",
        "ficco/ops/gradients.py",
        "a transposed operator returns no gradient of b if the gradient of a is required, too",
        ("contract.py::test_gradient",),
        "_required(saved.b), grad, False)[0] if to_a else None\n    if not to_b:",
        "_required(saved.b), grad, False)[0] if to_a else None\n    if not to_b or to_a:",
    ),
    Fault(
        "equal-purpose",
        "ficco/ops/gradients.py",
        "backward calls for different gradients on the ranks are treated as equal",
        ("gradients.py::test_ranks_that_need_other_gradients_learn_it",),
        "call = call._replace(purpose=_purpose(call.operator, *wanted))",
        "call = call._replace(purpose=_purpose(call.operator, True, True))",
    ),
    Fault(
        "short-key",
        "ficco/ops/call.py",
        "a call with another cap on its memory takes the plan of an earlier call",
        ("operators.py::test_any_cap_is_exact_or_refused",),
        "options.workspace_bytes, options.machine, place, self.purpose",
        "options.machine, place, self.purpose",
    ),
    Fault(
        "fake-shape",
        "ficco/ops/library.py",
        "the traced shape of the gathered A has the rows of the shard",
        ("contract.py::test_traced",),
        "return (out, a.new_empty((multiplied, k))) if return_gathered else out",
        "return (out, a.new_empty((held, k))) if return_gathered else out",
    ),
    Fault(
        "sequence-dim",
        "ficco/nn/linear.py",
        "a layer whose weight has its own kernel treats the first dimension as the sequence",
        ("changed_layers.py::test_weights_with_kernels_of_their_own_are_multiplied_by_them",),
        "dim, last = sequence_at(x, self.sequence_dim), x.dim() - 1",
        "dim, last = sequence_at(x, 0), x.dim() - 1",
    ),
    Fault(
        "bias-gradient",
        "ficco/nn/functional.py",
        "the gradient of a replicated bias covers only the rows of one rank",
        ("nn.py::test_column_and_row_are_exact",),
        "return biased(y, None if bias is None else sum_gradient(bias, group))",
        "return biased(y, bias)",
    ),
    Fault(
        "changed-operand",
        "ficco/passes/match.py",
        "a product is replaced although its operand is written after the collective",
        ("passes.py::test_what_stays_has_a_reason",),
        "        for gather, tensor in travel:\n",
        "        for gather, tensor in travel[1:]:\n",
    ),
    Fault(
        "ratio-of-medians",
        "ficco/tools/bench/report.py",
        "candidates are compared by medians over all rounds, not round by round",
        ("bench.py::test_ratios_are_taken_round_by_round",),
        "return times.rdiv(reference, axis=0).median()",
        "return reference.median() / times.median()",
    ),
)
