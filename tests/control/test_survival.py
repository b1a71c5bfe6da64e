"""Which plans outlive the loss of a node, and what that is worth."""

import itertools

import pytest

from nereus_jax.control.admission import Verdict, choose_profitable
from nereus_jax.control.costs import Beliefs, Candidate, TransitionEstimate
from nereus_jax.control.policies import payback
from nereus_jax.control.survival import survives
from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.execution_plan import ExecutionPlan, StageChoice
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.roles import ACTOR_TRAIN, CRITIC_TRAIN, Stage
from nereus_jax.simulator.setup import first_plan
from tests.control.toy_job import ToyCosts, toy_plan, workload
from tests.simulator.scenarios import small_scenario

POOL = DevicePool.uniform(2, 4)


def make_plan(
    layout: ParallelLayout, devices: tuple[DeviceId, ...] = POOL.devices, zero1: bool = False
) -> ExecutionPlan:
    placement = Placement(layout=layout, devices=devices[: layout.num_devices])
    stages = (ACTOR_TRAIN, CRITIC_TRAIN)
    return ExecutionPlan(
        plan=Plan(placements=dict.fromkeys(stages, placement)),
        choices=dict.fromkeys(stages, StageChoice(microbatch_size=1, zero1=zero1)),
    )


def host(device: DeviceId) -> int:
    return device.host


@pytest.mark.parametrize(
    ("layout", "zero1", "expected"),
    [
        (ParallelLayout(2, 1, 4), False, True),  # a replica on each node
        (ParallelLayout(2, 1, 4), True, False),  # each has half of the optimizer
        (ParallelLayout(1, 2, 4), False, False),  # one replica over both
        (ParallelLayout(4, 1, 2), False, True),  # two replicas on each
        (ParallelLayout(3, 1, 2), False, True),
        (ParallelLayout(2, 1, 2), False, True),  # all on one node: a device may go
        (ParallelLayout(1, 1, 4), False, False),
    ],
)
def test_by_hand(layout: ParallelLayout, zero1: bool, expected: bool) -> None:
    assert survives(make_plan(layout, zero1=zero1), host) is expected


def test_blocks_that_lie_on_one_node_are_lost_with_it() -> None:
    """Two replicas over both nodes, but the first block of both is on the first node."""
    crossed = tuple(DeviceId(*x) for x in ((0, 0), (1, 0), (0, 1), (1, 1)))
    assert not survives(make_plan(ParallelLayout(2, 1, 2), crossed), host)
    turned = tuple(DeviceId(*x) for x in ((0, 0), (1, 0), (1, 1), (0, 1)))
    assert survives(make_plan(ParallelLayout(2, 1, 2), turned), host)


def test_a_plan_survives_where_a_transition_can_be_planned() -> None:
    """The rule says what the planner of transitions finds when a node is gone."""
    made = small_scenario()
    costs, pool, start = made.costs, made.cluster.pool, first_plan(made)
    lost = frozenset(pool.devices[:4])
    found = costs.candidates(
        made.cluster.problem.workload,
        pool.without(lost),
        Beliefs(),
        current=start,
        count=2,
        surviving=True,
    )
    target = next(c.plan for c in found.plans if "whole replicas" in c.origin)
    assert not any(c.zero1 for s, c in target.choices.items() if s.stage is Stage.TRAIN)
    for (dp, tp), zero1 in itertools.product(((2, 4), (4, 2), (8, 1), (1, 8)), (False, True)):
        placement = Placement(layout=ParallelLayout(dp, 1, tp), devices=pool.devices)
        trained = {s: placement for s in start.choices if s.stage is Stage.TRAIN}
        how = dict.fromkeys(trained, StageChoice(microbatch_size=1, zero1=zero1))
        source = ExecutionPlan(
            plan=Plan(placements={**start.plan.placements, **trained}),
            choices={**start.choices, **how},
        )
        way = costs.transition(source, target, Beliefs(), lost=lost)
        assert way.executable == survives(source, host), (dp, tp, zero1, way.reason)


def test_losses_weigh_in_admission() -> None:
    """10 s a step that losses are expected to cost: a plan that is 1 s slower and survives them is
    9 s better."""
    costs, plan = ToyCosts(), toy_plan(POOL.devices, 1)
    other = toy_plan(POOL.devices, 2)
    price = costs.price(other, workload(), POOL, Beliefs())

    def estimate(candidate: Candidate) -> TransitionEstimate:
        return costs.transition(plan, candidate.plan, Beliefs())

    slower = Candidate(plan=other, price=price, origin="toy")
    now_s = price.step_s - 1.0
    assert choose_profitable(now_s, [slower], estimate, payback(), 4.0).verdict is Verdict.KEEP
    choice = choose_profitable(now_s + 10.0, [slower], estimate, payback(), 4.0)
    assert choice.taken is not None and choice.taken.gain_s == pytest.approx(9.0)
    risky = Candidate(plan=other, price=price, origin="toy", risk_s=10.0)
    assert choose_profitable(now_s + 10.0, [risky], estimate, payback(), 4.0).taken is None
