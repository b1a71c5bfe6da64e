"""The record of a replan: one line of decisions.jsonl, with every term that led to it."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nereus_jax.control.admission import Assessed, Choice
from nereus_jax.control.costs import TransitionEstimate
from nereus_jax.control.policies import Policy
from nereus_jax.core.devices import DeviceId
from nereus_jax.core.events import Decision, decision_to_json
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.planning.plan_price import PlanPrice

REASONS_KEPT = 5
"""Candidates that a record tells of at most beside the one that is taken."""


def decision_digest(decision: Decision) -> str:
    """64 hexadecimal digits that are equal where decisions are, records included: what processes
    compare before anything is dispatched."""
    text = json.dumps(decision_to_json(decision), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def device_ranges(devices: Iterable[DeviceId]) -> str:
    """`0:0-7,1:0-7`: ascending, runs of a host drawn together."""
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and runs[-1][0] == device.host and runs[-1][2] + 1 == device.index:
            runs[-1][2] = device.index
        else:
            runs.append([device.host, device.index, device.index])
    return ",".join(f"{h}:{a}" if a == b else f"{h}:{a}-{b}" for h, a, b in runs)


def parse_ranges(text: str) -> tuple[DeviceId, ...]:
    """Reads `device_ranges`, in any order.

    Raises:
      ValueError: it is something else.
    """
    devices: list[DeviceId] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        start = DeviceId.parse(first)
        stop = int(last) if dash else start.index
        if stop < start.index:
            raise ValueError(f"devices are written host:index or host:first-last, got {part!r}")
        devices += [DeviceId(start.host, i) for i in range(start.index, stop + 1)]
    return tuple(devices)


def bytes_by_device(sizes: Mapping[DeviceId, float]) -> dict[str, int]:
    """Bytes by ranges of devices that have as many."""
    groups: dict[int, list[DeviceId]] = {}
    for device, size in sizes.items():
        groups.setdefault(round(size), []).append(device)
    return {device_ranges(d): size for size, d in sorted(groups.items(), key=lambda x: -x[0])}


def plan_json(plan: ExecutionPlan) -> dict[str, Any]:
    """A plan as a record tells it: devices as ranges where they ascend, else one by one."""
    return {
        str(stage): {
            "dp": placement.layout.dp,
            "pp": placement.layout.pp,
            "tp": placement.layout.tp,
            "devices": _devices(placement.devices),
            **dataclasses.asdict(plan.choices[stage]),
        }
        for stage, placement in sorted(plan.plan.placements.items())
    }


def _devices(devices: tuple[DeviceId, ...]) -> str:
    if all(a < b for a, b in itertools.pairwise(devices)):
        return device_ranges(devices)
    return ",".join(map(str, devices))


def parse_plan(data: Mapping[str, Mapping[str, Any]]) -> ExecutionPlan:
    """Reads `plan_json`.

    Raises:
      ValueError: an entry is something else.
    """
    entries = {
        name: {**entry, "devices": [str(d) for d in parse_ranges(entry["devices"])]}
        for name, entry in data.items()
    }
    return ExecutionPlan.from_json(entries)


def price_json(price: PlanPrice) -> dict[str, Any]:
    """Every term of a price."""
    return {
        "step_s": price.step_s,
        "peak_bytes": round(price.peak_bytes),
        "limit_bytes": round(price.limit_bytes),
        "device_bytes": bytes_by_device(price.device_bytes),
        "stages": {
            str(stage): {
                "seconds": own.seconds,
                "seconds_by_class": {c.value: s for c, s in own.seconds_by_class.items()},
                "edge_s": own.edge_s,
                "park_s": own.park_s,
                "bytes": {kind: round(size) for kind, size in own.memory.items()},
            }
            for stage, own in sorted(price.stages.items())
        },
    }


def transition_json(estimate: TransitionEstimate) -> dict[str, Any]:
    """Every term of a transition."""
    links = estimate.link_bytes
    return {
        "executable": estimate.executable,
        "reason": estimate.reason,
        "seconds": estimate.seconds,
        "parts_s": dict(estimate.parts_s),
        "bytes": {
            "local": links.local,
            "intra_node": links.intra_node,
            "inter_node": links.inter_node,
            "host": links.host,
            "storage": links.storage,
        },
        "device_bytes": bytes_by_device(estimate.device_bytes),
    }


def _candidate_json(assessed: Assessed) -> dict[str, Any]:
    candidate, transition = assessed.candidate, assessed.transition
    return {
        "origin": candidate.origin,
        "plan": plan_json(candidate.plan),
        "price": price_json(candidate.price),
        "transition": None if transition is None else transition_json(transition),
        "by_checkpoint": assessed.by_checkpoint,
        "risk_s": candidate.risk_s,
        "gain_s": assessed.gain_s,
        "doubt_s": assessed.doubt_s,
        "payback_steps": assessed.payback_steps,
        "admitted": assessed.admitted,
        "reason": assessed.reason,
    }


def make_record(
    *,
    step: int,
    time_s: float,
    triggers: Sequence[str],
    policy: Policy,
    plan: ExecutionPlan,
    price: PlanPrice,
    choice: Choice,
    horizon_steps: float,
    pool: str,
    workload: Mapping[str, float],
) -> dict[str, Any]:
    """The line of a replan.

    Args:
      step: the next step.
      time_s: on the run's clock.
      triggers: why there was a replan.
      policy: which.
      plan: the plan that holds.
      price: of it, under the workload that is expected.
      choice: the outcome.
      horizon_steps: H_x.
      pool: the devices that may be used.
      workload: what was expected of the steps to come.
    """
    taken = choice.taken
    shown = [a for a in choice.assessed if not a.admitted][:REASONS_KEPT]
    first = taken or (choice.assessed[0] if choice.assessed else None)
    transition = None if first is None else first.transition
    return {
        "step": step,
        "time_s": time_s,
        "trigger": ", ".join(triggers),
        "policy": policy.name,
        "plan": plan_json(plan),
        "target": None if taken is None else plan_json(taken.candidate.plan),
        "step_s_predicted": price.step_s,
        "step_s_target_predicted": None if first is None else first.candidate.price.step_s,
        "transition_s_predicted": None if transition is None else transition.seconds,
        "payback_steps": None if first is None else first.payback_steps,
        "gamma": policy.gamma,
        "horizon_steps": horizon_steps,
        "verdict": choice.verdict.value,
        "reason": choice.reason,
        "pool": pool,
        "workload": dict(workload),
        "current": price_json(price),
        "candidates": [
            _candidate_json(a) for a in ((taken, *shown) if taken is not None else shown)
        ],
    }
