"""The same plan on the same devices with less memory: what an urgent case tries beside other plans.

No state moves; programs are compiled anew.
"""

import dataclasses
from collections.abc import Callable, Iterator

from nereus_jax.core.execution_plan import ExecutionPlan, StageChoice
from nereus_jax.core.layout import divisors
from nereus_jax.core.roles import ModelStage, Stage
from nereus_jax.planning.plan_price import PlanPrice
from nereus_jax.planning.workload import Workload

Price = Callable[[ExecutionPlan], PlanPrice]
MAX_RUNGS = 24
"""Steps down the ladder; each halves a microbatch, recomputes, or parks."""


def with_choice(plan: ExecutionPlan, stage: ModelStage, choice: StageChoice) -> ExecutionPlan:
    """A plan with another choice for one model-stage."""
    return dataclasses.replace(plan, choices={**plan.choices, stage: choice})


def smaller_microbatch(
    plan: ExecutionPlan, stage: ModelStage, workload: Workload
) -> ExecutionPlan | None:
    """The next smaller microbatch, about a half; None: it is as small as it gets.

    A replica of TRAIN takes the same rows an update, so that its microbatch divides them.
    """
    layout, choice = plan.plan[stage].layout, plan.choices[stage]
    train = stage.stage is Stage.TRAIN
    rows = min(workload.minibatch_size, workload.rows) if train else workload.rows
    own = -(-rows // layout.dp)
    size = min(choice.microbatch_size or own, own)
    least = layout.pp if stage.stage is Stage.GENERATE else 1
    if train:
        smaller = max((d for d in divisors(own) if d <= size // 2), default=0)
    else:
        smaller = size // 2
    if smaller < max(least, 1):
        return None
    return with_choice(plan, stage, dataclasses.replace(choice, microbatch_size=smaller))


def recomputed(plan: ExecutionPlan, stage: ModelStage) -> ExecutionPlan | None:
    """With the activations of each layer computed again; None: they are already, or none are
    kept."""
    choice = plan.choices[stage]
    if stage.stage is not Stage.TRAIN or choice.remat:
        return None
    return with_choice(plan, stage, dataclasses.replace(choice, remat=True))


def parked(plan: ExecutionPlan, stage: ModelStage) -> ExecutionPlan | None:
    """With the model-stage in the memory of its hosts while others run; None: it is already."""
    choice = plan.choices[stage]
    if choice.parked:
        return None
    return with_choice(plan, stage, dataclasses.replace(choice, parked=True))


def sparing(
    plan: ExecutionPlan, workload: Workload, price: Price, *, park: bool = True
) -> Iterator[tuple[ExecutionPlan, PlanPrice, str]]:
    """Variants of a plan that fit, in the order in which they are found.

    From the plan down: the model-stage that fills the fullest device takes a smaller microbatch;
    when there is none, it recomputes; then the largest idle model-stage there is parked.

    Args:
      plan: that does not fit.
      workload: what memory must suffice for.
      price: of a plan under that workload.
      park: idle model-stages may wait in the host's memory.

    Yields:
      A plan that fits, its price, and what was changed.
    """
    current, changed = plan, ""
    now = price(current)
    for _ in range(MAX_RUNGS):
        if now.fits:
            if changed:
                yield current, now, changed
            return
        step = _next_rung(current, now, workload, park)
        if step is None:
            return
        current, changed = step[0], f"{changed}, {step[1]}" if changed else step[1]
        now = price(current)


def _next_rung(
    plan: ExecutionPlan, price: PlanPrice, workload: Workload, park: bool
) -> tuple[ExecutionPlan, str] | None:
    fullest = max(price.device_bytes, key=lambda d: (price.device_bytes[d], d))
    here = [s for s, p in plan.plan.placements.items() if fullest in p.devices]
    here.sort(key=lambda s: (-price.stages[s].working_bytes, s))
    worst = here[0]
    smaller = smaller_microbatch(plan, worst, workload)
    if smaller is not None:
        return smaller, f"{worst} with a smaller microbatch"
    again = recomputed(plan, worst)
    if again is not None:
        return again, f"{worst} with recomputation"
    idle = [s for s in here if s != worst and not plan.choices[s].parked] if park else []
    if not idle:
        return None
    largest = max(idle, key=lambda s: (price.stages[s].resident_bytes, str(s)))
    away = parked(plan, largest)
    return None if away is None else (away, f"{largest} parked")
