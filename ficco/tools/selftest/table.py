"""All checks in their order, and what is used where one fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch.distributed import ProcessGroup

from ficco.dma import ways
from ficco.dma.ways import variable
from ficco.problems.products import OPERATORS, Problem
from ficco.schedules import NAMED, refusal
from ficco.tools import probe
from ficco.tools.bench.cases import OPERATOR as GATHER
from ficco.tools.selftest import checks, kernels, speed
from ficco.tools.selftest.rank import Passed, Rank


@dataclass(frozen=True)
class Check:
    """A thing that is assumed; ``instead`` says what is used where it does not hold.

    An ``exclusive`` check has ranks of its own, since it leaves them in a state that no other
    should meet; ``limits`` is the time that it may take, in limits of the settings.
    """

    name: str
    run: Callable[[Rank, ProcessGroup], Passed]
    instead: str
    exclusive: bool = False
    limits: int = 1

    def on(self, engine: str) -> Check:
        """The check with the advice for an engine."""
        advice = probe.ADVICE[engine].get(self.name)
        return replace(self, instead=f"{self.instead}; {advice}") if advice else self


COLLECTIVE = "schedule='serial:collective', or PyTorch's own collectives"

CHECKS = (
    Check("device and engine", checks.device, COLLECTIVE),
    Check("memory of peers", checks.memory, COLLECTIVE),
    Check(
        "signals, first way",
        partial(checks.signals, way="auto"),
        "options(signals='copy')",
    ),
    Check("signals by write", partial(checks.signals, way="write"), "the first way"),
    Check("signals by copy", partial(checks.signals, way="copy"), "the first way"),
    Check(
        "order of copy and signal",
        checks.ordering,
        "options(signals='copy'); options(replay=False) if only that is right",
        limits=2,
    ),
    Check(
        "2D copies",
        checks.columns,
        "schedules whose names end in 1d, which copy whole rows, if you ask for them; without 2D "
        "copies the engine packs columns, or copies them by ficco's kernel or row by row",
    ),
    *(
        Check(
            f"schedule {name}",
            partial(checks.schedule, name=name),
            "another schedule=; 'auto' does not know that it fails",
        )
        for name in NAMED
        if name != "tiled"  # whose sizes are not any
        and not refusal(Problem(GATHER, (1, 1), 1, 1, "float32"), NAMED[name])
    ),
    Check(
        "product whose tiles wait",
        checks.tiles,
        "another schedule= than tiled; 'auto' takes it only where it was measured",
    ),
    Check("schedule serial:collective", checks.collective, "schedule='serial'"),
    *(
        Check(
            f"operator {name}",
            partial(checks.operator, operator=name),
            "PyTorch's own collective and product",
            limits=2,
        )
        for name in OPERATORS
        if name != GATHER
    ),
    Check("copies by kernel", checks.mover, "the mover dma: leave the knob kernel out"),
    Check("kernels", kernels.own, "PyTorch's operations, and signals by stream writes and waits"),
    Check("graphs", checks.graph, "calls outside of graphs"),
    Check(
        "bandwidth of pairs",
        speed.bandwidth_of_pairs,
        "nothing: plans take all pairs to be alike; look at the links that ficco doctor lists, or "
        "leave a rank of the slow pair out",
        limits=2,
    ),
    Check(
        "bandwidth of all pairs",
        speed.bandwidth_of_all,
        "schedules with fewer copy lanes (copy=), in case that lanes run one after the other",
        limits=3,
    ),
    Check(
        "products beside copies",
        speed.overlap,
        "copies by compute units, which slow products down",
    ),
    Check("timeouts", checks.timeout, "a limit of your own for each call", exclusive=True),
)

#: What each engine goes by: attributes of the device, kinds of memory, and the ways that it can be
#: told to go. Those of the other engines are not tried.
WAYS = {
    engine: (
        *(
            Check(f"attribute {name}", partial(checks.attribute, engine=engine, name=name), instead)
            for name, instead in probe.ATTRIBUTES[engine].items()
        ),
        *(
            Check(f"sharing of {kind} memory", partial(checks.sharing, kind=kind), instead)
            for kind, instead in probe.SHARED[engine].items()
        ),
        *(
            Check(
                f"{variable(engine)}={what}={value}",
                partial(checks.way, variable=variable(engine), what=what, value=value),
                f"leave {what} out of {variable(engine)}, or name another of {', '.join(values)}",
            )
            for what, values in choices.items()
            for value in values
        ),
    )
    for engine, choices in ways.WAYS.items()
}
