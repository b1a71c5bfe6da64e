# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""Other systems as plans and rules, on the same engines and the same simulated cluster.

What differs between them here is where model-stages lie and when they move, nothing else: kernels,
schedules and weight edges are this project's. So they bound what placement is worth, and say
nothing of the systems' own speed.

- `openrlhf_like`: generation, actor and critic on devices of their own (half, a quarter, a
  quarter; reference with the actor, reward with the critic), no pipeline, and it stays so.
- `verl_like`: every model-stage on all devices in turn, no pipeline, the best degrees and
  microbatches for the first step, and it stays so.
- `dynarl_like`: from the planner's best plan, devices move among model-stages whose degrees of
  tensor and pipeline parallelism stay, at any gain.
- `checkpoint_restart`: any plan at any gain, but every change is a checkpoint and a restart.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nereus_jax.control.policies import Gain, Policy, any_gain, static
from nereus_jax.core.devices import DeviceId
from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.execution_plan import ExecutionPlan, StageChoice
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.roles import ModelStage, Role, Stage
from nereus_jax.planning.candidates import Candidates, enumerate_candidates
from nereus_jax.planning.cost import stage_seconds
from nereus_jax.planning.search_problem import PlanProblem, stage_memory, with_edges
from nereus_jax.simulator.scenario import Rules, Scenario
from nereus_jax.simulator.setup import first_plan, first_pool, first_workload, settings_for

Floats = NDArray[np.float64]

PEERS = ("openrlhf_like", "verl_like", "dynarl_like", "checkpoint_restart")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Options:
    """Ways to run a model-stage on a given number of devices, [C] each."""

    candidates: Candidates
    seconds: Floats
    held_bytes: Floats
    working_bytes: Floats


def peer(name: str, scenario: Scenario) -> tuple[Rules, ExecutionPlan]:
    """A system's rules and its first plan.

    Args:
      name: one of `PEERS`.
      scenario: job, cluster and trace.

    Raises:
      InfeasiblePlanError: its plan does not fit the devices that the trace starts with.
    """
    pool = first_pool(scenario).devices
    stages = scenario.cluster.problem.workflow.model_stages
    policy = dataclasses.replace(static(), name=name)
    if name == "openrlhf_like":
        plan = grouped_plan(scenario, _split(pool, stages))
    elif name == "verl_like":
        plan = grouped_plan(scenario, [(pool, stages)])
    elif name == "dynarl_like":
        policy = Policy(name=name, gain=Gain.ANY, foresees=False, same_degrees=True)
        plan = first_plan(scenario)
    else:
        policy = dataclasses.replace(any_gain(), name=name)
        plan = first_plan(scenario)
    settings = settings_for(scenario, policy)
    rules = Rules(name=name, settings=settings, by_checkpoint=name == "checkpoint_restart")
    return rules, plan


def _split(
    pool: Sequence[DeviceId], stages: Sequence[ModelStage]
) -> list[tuple[Sequence[DeviceId], Sequence[ModelStage]]]:
    """Half of the devices generate, a quarter each has the actor and the critic; without a critic
    the actor has the other half."""
    half = len(pool) // 2
    cuts = [0, half, half + half // 2, 2 * (half // 2) + half]
    generate = [s for s in stages if s.stage is Stage.GENERATE]
    critic = [s for s in stages if s.role in (Role.CRITIC, Role.REWARD)]
    actor = [s for s in stages if s not in generate and s not in critic]
    groups = [generate, actor, critic]
    if not critic:
        groups, cuts = [generate, actor], [0, half, 2 * half]
    return [(pool[a:b], g) for a, b, g in zip(cuts, cuts[1:], groups, strict=False)]


def grouped_plan(
    scenario: Scenario, groups: Sequence[tuple[Sequence[DeviceId], Sequence[ModelStage]]]
) -> ExecutionPlan:
    """Every model-stage on all devices of its group, without a pipeline; degrees and microbatches
    are the fastest that fit together.

    From the fastest way of each model-stage on, what costs the least seconds for a byte that the
    group saves is given up, until it fits.

    Raises:
      InfeasiblePlanError: it never does.
    """
    placements: dict[ModelStage, Placement] = {}
    choices: dict[ModelStage, StageChoice] = {}
    problem = dataclasses.replace(scenario.cluster.problem, workload=first_workload(scenario))
    for devices, stages in groups:
        options = {s: _options(problem, s, len(devices)) for s in stages}
        taken = _fitting(options, problem.limit_bytes)
        for stage, index in taken.items():
            c = options[stage].candidates
            placements[stage] = Placement(layout=c.layout(index), devices=tuple(devices))
            choices[stage] = StageChoice(
                microbatch_size=int(c.microbatch_size[index]),
                microbatches=int(c.microbatches[index]),
                remat=bool(c.remat[index]),
                zero1=bool(c.zero1[index]),
            )
    return ExecutionPlan(plan=Plan(placements=placements), choices=choices)


def _options(problem: PlanProblem, stage: ModelStage, devices: int) -> _Options:
    """The ways that use all devices of a group and no pipeline."""
    p, model = problem, problem.models[stage.role]
    every = enumerate_candidates(model, stage, p.workload, p.hardware, max(devices, 1))
    c = every.take((every.pp == 1) & (every.devices == devices))
    if not len(c):
        raise InfeasiblePlanError(
            f"{stage} has no layout without a pipeline on exactly {devices} devices; use a number "
            f"of devices that the minibatch and the model's heads divide"
        )
    memory = with_edges(p, stage, stage_memory(p, stage, c))
    cost = stage_seconds(
        model,
        p.head(stage),
        stage,
        p.workload,
        p.hardware,
        p.efficiencies,
        c,
        dtype=p.compute_dtype,
    )
    return _Options(
        candidates=c,
        seconds=cost.total_s,
        held_bytes=memory.held_bytes,
        working_bytes=memory.working_bytes,
    )


def _fitting(options: Mapping[ModelStage, _Options], limit: float) -> dict[ModelStage, int]:
    taken = {s: int(np.argmin(o.seconds)) for s, o in options.items()}

    def peak(changed: ModelStage | None = None, index: int = 0) -> float:
        held = {s: (o, index if s == changed else taken[s]) for s, o in options.items()}
        resident = sum(float(o.held_bytes[i]) for o, i in held.values())
        return resident + max(float(o.working_bytes[i]) for o, i in held.values())

    while peak() > limit:
        now = peak()
        best: tuple[float, ModelStage, int] | None = None
        for stage, o in options.items():
            for i in range(len(o.candidates)):
                saved = now - peak(stage, i)
                if saved <= 0.0:
                    continue
                lost = max(float(o.seconds[i] - o.seconds[taken[stage]]), 0.0) / saved
                if best is None or lost < best[0]:
                    best = lost, stage, i
        if best is None:
            raise InfeasiblePlanError(
                f"{', '.join(map(str, options))} do not fit their devices together: "
                f"{(now - limit) / 2**30:.1f} GiB short of a device; use more devices"
            )
        taken[best[1]] = best[2]
    return taken
