# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""Policies side by side: the same scenarios, the same seeds, the same first plan."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nereus_jax.control.policies import POLICIES, parse_policy
from nereus_jax.core.errors import ConfigError
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.simulator.gaps import GapParts, gap_parts
from nereus_jax.simulator.ledger import RunResult
from nereus_jax.simulator.oracle import NAME as ORACLE
from nereus_jax.simulator.oracle import oracle
from nereus_jax.simulator.peers import PEERS, peer
from nereus_jax.simulator.run import simulate
from nereus_jax.simulator.scenario import Rules, Scenario
from nereus_jax.simulator.setup import first_plan, settings_for

ALL = (*POLICIES, ORACLE)
FIGURES = (
    "mean_step_s",
    "total_s",
    "gpu_hours",
    "transitions",
    "transition_share",
    "oom",
    "gap_to_oracle",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs by policy, in the order of the seeds.

    Attributes:
      runs: of each policy.
      bounds: of the oracle; empty: it was not asked for.
    """

    runs: Mapping[str, Sequence[RunResult]]
    bounds: Sequence[RunResult] = ()

    def figures(self) -> dict[str, dict[str, float | None]]:
        """Means over seeds with their standard deviations, by policy; null where there is none."""
        every = {**self.runs, **({ORACLE: self.bounds} if self.bounds else {})}
        return {name: self._of(runs) for name, runs in every.items()}

    def _of(self, runs: Sequence[RunResult]) -> dict[str, float | None]:
        columns: dict[str, list[float]] = {
            name: [float(getattr(r, name)) for r in runs] for name in FIGURES[:-1]
        }
        columns["gap_to_oracle"] = [
            r.mean_step_s / b.mean_step_s - 1.0
            for r, b in zip(runs, self.bounds, strict=False)
            if not r.failure and not b.failure
        ]
        found: dict[str, float | None] = {}
        for name in FIGURES:
            values = columns[name]
            found[name] = float(np.mean(values)) if values else None
            found[f"{name}_std"] = float(np.std(values)) if values else None
        return found

    def gaps(self) -> dict[str, dict[str, float]]:
        """By policy the parts of its gap to the oracle, in seconds a step, means over seeds."""
        found: dict[str, dict[str, float]] = {}
        for name, runs in self.runs.items():
            parts = [
                {k: x / len(r.steps) for k, x in dataclasses.asdict(own).items()}
                for r, b in zip(runs, self.bounds, strict=False)
                if (own := gap_parts(r, b)) is not None
            ]
            names = [field.name for field in dataclasses.fields(GapParts)]
            if parts:
                found[name] = {n: float(np.mean([p[n] for p in parts])) for n in names}
        return found

    def to_json(self) -> dict[str, Any]:
        """The figures, and each run's own; all of them are simulated."""
        every = {**self.runs, **({ORACLE: self.bounds} if self.bounds else {})}
        return {
            "simulated": True,
            "policies": self.figures(),
            "gap_parts_per_step": self.gaps(),
            "runs": [r.to_json() for runs in every.values() for r in runs],
        }

    def table(self) -> str:
        """The figures as text."""
        lines = [
            f"{'policy (simulated)':20} {'s/step':>16} {'hours':>8} {'GPU-hours':>10} {'moves':>7} "
            f"{'in moves':>9} {'OOM':>5} {'to oracle':>10}"
        ]
        for name, f in self.figures().items():
            gap = f["gap_to_oracle"]
            lines.append(
                f"{name:20} {f['mean_step_s']:9.1f} ± {f['mean_step_s_std']:4.1f} "
                f"{_of(f, 'total_s') / 3600:8.2f} {f['gpu_hours']:10.1f} {f['transitions']:7.1f} "
                f"{_of(f, 'transition_share'):9.2%} {f['oom']:5.1f} "
                f"{'-' if gap is None else f'{gap:.2%}':>10}"
            )
            failed = [r.failure for r in (*self.runs.get(name, ()),) if r.failure]
            lines += [f"  failed: {text}" for text in failed[:1]]
        return "\n".join(lines) + "\n"


def _of(figures: Mapping[str, float | None], name: str) -> float:
    value = figures[name]
    assert value is not None
    return value


def check_policies(names: Sequence[str]) -> tuple[str, ...]:
    """Names with `all` replaced by those that it stands for.

    Raises:
      ConfigError: a name is not known.
    """
    found: list[str] = []
    for name in names:
        if name == "all":
            found += ALL
            continue
        if name != ORACLE and name not in PEERS:
            if name.split("=")[0].split("(")[0].strip() not in POLICIES:
                known = ", ".join((*ALL, *PEERS, "all"))
                raise ConfigError(f"policy {name!r} is not known; use one of {known}")
            parse_policy(name)
        found.append(name)
    return tuple(dict.fromkeys(found))


def compare(
    scenario: Callable[[int], Scenario],
    policies: Sequence[str],
    seeds: Sequence[int],
    progress: Callable[[RunResult], None] | None = None,
) -> Comparison:
    """Runs policies.

    Args:
      scenario: by seed.
      policies: names, as `check_policies` has them.
      seeds: one run for each.
      progress: told of every run that has ended.

    Raises:
      ConfigError: there is no seed, or a name is not known.
      InfeasiblePlanError: the first step fits no plan.
    """
    if not seeds:
        raise ConfigError("simulate: seeds must be at least 1, got 0")
    names = check_policies(policies)
    runs: dict[str, list[RunResult]] = {n: [] for n in names if n != ORACLE}
    bounds: list[RunResult] = []
    for seed in seeds:
        made = scenario(seed)
        plan = first_plan(made)
        for name in runs:
            runs[name].append(run_policy(made, name, plan))
            if progress is not None:
                progress(runs[name][-1])
        if ORACLE in names:
            own = [own_runs[-1] for own_runs in runs.values()]
            bounds.append(bound(made, plan, own))
            if progress is not None:
                progress(bounds[-1])
    return Comparison(runs=runs, bounds=tuple(bounds))


def run_policy(scenario: Scenario, name: str, plan: ExecutionPlan) -> RunResult:
    """One policy or peer through a scenario; peers that have plans of their own ignore `plan`."""
    if name in PEERS:
        rules, plan = peer(name, scenario)
        return simulate(scenario, rules, plan)
    settings = settings_for(scenario, parse_policy(name))
    return simulate(scenario, Rules(name=name, settings=settings), plan)


def bound(scenario: Scenario, plan: ExecutionPlan, runs: Sequence[RunResult]) -> RunResult:
    """The oracle, shown all plans that other runs had; it prices with what the longest of them
    learned."""
    shown: dict[int, ExecutionPlan] = {id(plan): plan}
    for run in runs:
        shown |= {id(row.plan): row.plan for row in run.steps}
    best = max(runs, key=lambda r: len(r.steps), default=None)
    if best is None:
        settings = settings_for(scenario, parse_policy("payback"))
        best = simulate(scenario, Rules(name="payback", settings=settings), plan)
        shown |= {id(row.plan): row.plan for row in best.steps}
    return oracle(scenario, list(shown.values()), best.beliefs)
