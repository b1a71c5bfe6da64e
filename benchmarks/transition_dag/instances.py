"""Random pairs of plans of PPO's seven model-stages, and what their units hold."""

import random
from collections.abc import Sequence

from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.presets import preset
from nereus_jax.core.roles import (
    ACTOR_GENERATE,
    ACTOR_SCORE,
    ACTOR_TRAIN,
    CRITIC_SCORE,
    CRITIC_TRAIN,
    REFERENCE_SCORE,
    REWARD_SCORE,
    ModelStage,
    Stage,
)
from nereus_jax.planning.transition_inputs import StageState, TransitionBudget, decoder_states

WAVES: tuple[tuple[ModelStage, ...], ...] = (
    (ACTOR_GENERATE,),
    (ACTOR_SCORE, CRITIC_SCORE, REFERENCE_SCORE, REWARD_SCORE),
    (ACTOR_TRAIN, CRITIC_TRAIN),
)
"""Model-stages of a wave run at the same time, on disjoint devices."""

NODE = 8


def random_plan(
    rng: random.Random, devices: Sequence[DeviceId], *, degrees: Sequence[int], least_train: int
) -> Plan:
    """A plan: each wave shares out the devices, each model-stage takes any layout on its part.

    Args:
      rng: source of the draws.
      devices: all of them, node by node.
      degrees: that tp and pp are drawn from.
      least_train: smallest tp * pp of a model-stage that trains (its state must fit).
    """
    step = max(min(NODE, len(devices) // 8), 1)
    placements: dict[ModelStage, Placement] = {}
    for wave in WAVES:
        cuts = sorted(rng.sample(range(1, len(devices) // step), len(wave) - 1))
        ends = [0, *(c * step for c in cuts), len(devices)]
        for stage, begin, end in zip(wave, ends, ends[1:], strict=False):
            least = least_train if stage.stage is Stage.TRAIN else 1
            placements[stage] = _place(rng, devices[begin:end], degrees, min(least, end - begin))
    return Plan(placements=placements)


def _place(
    rng: random.Random, devices: Sequence[DeviceId], degrees: Sequence[int], least: int
) -> Placement:
    while True:
        tp, pp = rng.choice(degrees), rng.choice(degrees)
        if least <= tp * pp <= len(devices):
            break
    dp = rng.randint(1, len(devices) // (tp * pp))
    step = min(tp * pp, NODE)
    start = rng.randrange(0, len(devices) - dp * pp * tp + 1) // step * step
    return Placement(
        layout=ParallelLayout(dp, pp, tp), devices=tuple(devices[start : start + dp * pp * tp])
    )


def random_pair(
    rng: random.Random, num_devices: int, *, degrees: Sequence[int], least_train: int
) -> tuple[Plan, Plan]:
    """Two random plans on the same devices."""
    devices = DevicePool.uniform(num_devices // NODE, NODE).devices
    plans = [random_plan(rng, devices, degrees=degrees, least_train=least_train) for _ in range(2)]
    return plans[0], plans[1]


def tight_budget(
    states: dict[ModelStage, StageState], plans: Sequence[Plan], slack: float
) -> TransitionBudget:
    """Memory for the larger of two plans on every device, and a part of the smaller one.

    Args:
      states: what model-stages hold.
      plans: source and target.
      slack: that part; 1: both fit side by side on every device.
    """
    held: list[dict[DeviceId, int]] = []
    for plan in plans:
        total: dict[DeviceId, int] = {}
        for stage, placement in plan.placements.items():
            state, layout = states[stage], placement.layout
            mesh = ParallelLayout(1, layout.pp, layout.tp).mesh_shape(state.num_kv_heads)
            num_bytes = state.parameters.local_bytes(mesh)
            if state.optimizer is not None:
                num_bytes += state.optimizer.local_bytes(mesh)
            for device in placement.devices:
                total[device] = total.get(device, 0) + num_bytes
        held.append(total)
    capacity: dict[DeviceId, int] = {}
    for device in {*held[0], *held[1]}:
        both = held[0].get(device, 0), held[1].get(device, 0)
        capacity[device] = int(max(both) + slack * min(both))
    return TransitionBudget(capacity_bytes=capacity, headroom=0.0, buffer_bytes=0, setup_s=0.005)


def llama_8b(*, weight_edges: bool = False) -> dict[ModelStage, StageState]:
    """The state of PPO with four models of 8B: all seven model-stages have to be moved, or only
    those that no weight edge fills."""
    stages = [stage for wave in WAVES for stage in wave]
    return decoder_states(preset("llama3-8b"), stages, weight_edges=weight_edges)
