# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""The bound: it knows what is coming, prices with the ground truth, and moves for free.

Before each step it takes the fastest of the plans that it is shown, on devices that stay for the
whole step: those that a search finds for exactly this step's rows, and all that other policies ran.
It can be beaten only by a plan that neither the search nor any policy found.
"""

import dataclasses
import math
from collections.abc import Iterable

from nereus_jax.control.costs import Beliefs
from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.events import DevicesJoined, DevicesLost, LengthSummary
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.simulator.cluster import StepOutcome
from nereus_jax.simulator.ledger import Interval, RunResult, Spent, StepRow
from nereus_jax.simulator.player import Player, PoolEvent
from nereus_jax.simulator.scenario import Scenario
from nereus_jax.simulator.stage_run import StepRows

NAME = "oracle"
ALIKE = 0.05
"""Steps whose mean and longest response differ by less share a search."""
SEARCHED = 4
"""Plans of a search that are tried."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Best:
    plan: ExecutionPlan
    outcome: StepOutcome


def oracle(
    scenario: Scenario,
    shown: Iterable[ExecutionPlan],
    beliefs: Beliefs,
) -> RunResult:
    """Runs it through a scenario.

    Args:
      scenario: job, cluster and trace.
      shown: plans of other runs, one at least.
      beliefs: what the search prices with; the better, the better the bound.
    """
    return _Oracle(scenario, list(shown), beliefs).result()


class _Oracle:
    def __init__(self, scenario: Scenario, shown: list[ExecutionPlan], beliefs: Beliefs) -> None:
        self._scenario, self._beliefs = scenario, beliefs
        self._plans: list[tuple[ExecutionPlan, frozenset[DeviceId]]] = []
        self._shown = {self._number(plan) for plan in shown}
        self._searched: dict[tuple[object, ...], set[int]] = {}
        self._player = Player(scenario.trace, scenario.cluster, scenario.cluster.seed)
        every = scenario.cluster.pool
        self._pool = every.without(set(every.devices) - set(self._player.first))
        self._clock = 0.0
        self._intervals: list[Interval] = []
        self._steps: list[StepRow] = []
        self._last_s: dict[int, float] = {}

    def result(self) -> RunResult:
        """Runs all steps."""
        failure = ""
        for step in range(self._scenario.trace.steps):
            self._apply(self._player.pop(step, self._clock, 0.0, self._clock))
            rows = self._scenario.rows(step)
            best = self._wait_for(step, rows)
            if best is None:
                failure = f"step {step}: no plan fits what is left of the trace's devices"
                break
            best = self._staying(step, rows, best)
            self._count(step, rows, best)
        return RunResult(
            policy=NAME,
            seed=self._scenario.cluster.seed,
            steps=tuple(self._steps),
            intervals=tuple(self._intervals),
            decisions=(),
            transitions=sum(
                a.plan != b.plan for a, b in zip(self._steps, self._steps[1:], strict=False)
            ),
            failure=failure,
            beliefs=self._beliefs,
        )

    def _number(self, plan: ExecutionPlan) -> int:
        """Of a plan among all that were seen."""
        for number, (known, _) in enumerate(self._plans):
            if plan == known:
                return number
        self._plans.append((plan, frozenset(_devices(plan))))
        return len(self._plans) - 1

    def _apply(self, events: list[PoolEvent]) -> None:
        for event in events:
            if isinstance(event, DevicesLost):
                self._pool = self._pool.without(event.devices)
            elif isinstance(event, DevicesJoined):
                self._pool = self._pool.joined(event.devices)

    def _wait_for(self, step: int, rows: StepRows) -> _Best | None:
        """The best plan, as soon as there are devices for one."""
        while True:
            best = self._best(step, rows, self._pool)
            if best is not None:
                return best
            at_s, events = self._player.skip(step, self._clock)
            if not events:
                return None
            self._intervals += _interval(
                Spent.WAITING, self._clock, at_s, len(self._pool), step, self._plans[0][0]
            )
            self._clock = at_s
            self._apply(events)

    def _staying(self, step: int, rows: StepRows, best: _Best) -> _Best:
        """A plan on devices that are there until its step ends."""
        step_s = best.outcome.step_s
        usable = self._pool
        while True:
            at_s = self._player.next_time(step, self._clock, step_s)
            if math.isinf(at_s):
                return best
            events = self._player.pop(step, self._clock, step_s, at_s)
            self._apply(events)
            usable = usable.without(set(usable.devices) - set(self._pool.devices))
            if not set(usable.devices).issuperset(_devices(best.plan)):
                found = self._best(step, rows, usable) if len(usable) else None
                if found is None:  # nothing lasts: it waits for the change, then starts the step
                    self._intervals += _interval(
                        Spent.WAITING, self._clock, at_s, len(self._pool), step, best.plan
                    )
                    self._clock = at_s
                    waited = self._wait_for(step, rows)
                    if waited is None:
                        return best
                    best, usable = waited, self._pool
                else:
                    best = found
                step_s = best.outcome.step_s

    def _best(self, step: int, rows: StepRows, pool: DevicePool) -> _Best | None:
        if not len(pool):
            return None
        numbers = self._shown | self._search(rows, pool)
        cluster, there = self._scenario.cluster, set(pool.devices)
        moment = cluster.moment(rows, step, self._clock)
        possible = [i for i in numbers if there.issuperset(self._plans[i][1])]
        best: _Best | None = None
        least = (math.inf, 0)
        # Those that were fast in the last step come first: most others need not be priced whole.
        for i in sorted(possible, key=lambda i: (self._last_s.get(i, 0.0), i)):
            plan = self._plans[i][0]
            step_s = cluster.step_s_within(plan, moment, least[0])
            self._last_s[i] = step_s
            if (step_s, i) < least:
                outcome = cluster.run_step(plan, moment, 0)
                if not outcome.out_of_memory:
                    best, least = _Best(plan=plan, outcome=outcome), (step_s, i)
        return best

    def _search(self, rows: StepRows, pool: DevicePool) -> set[int]:
        """Plans for these rows on this pool; one search for rows that are alike."""
        longest = self._scenario.cluster.room_tokens(rows)
        mean = round(math.log(float(rows.responses.mean())) / ALIKE)
        key = pool.devices, mean, round(math.log(longest) / ALIKE)
        if key in self._searched:
            return self._searched[key]
        found = self._scenario.costs.candidates(
            self._scenario.cluster.workload_of(rows, longest / float(rows.responses.max())),
            pool,
            self._beliefs,
            current=self._plans[0][0],
            count=SEARCHED,
        )
        self._searched[key] = {self._number(c.plan) for c in found.plans}
        return self._searched[key]

    def _count(self, step: int, rows: StepRows, best: _Best) -> None:
        outcome = best.outcome
        responses = LengthSummary.of(int(x) for x in rows.responses)
        end_s = self._clock + outcome.step_s
        self._steps.append(
            StepRow(
                step=step,
                start_s=self._clock,
                step_s=outcome.step_s,
                mean_tokens=responses.mean,
                p95_tokens=responses.p95,
                longest_tokens=responses.longest,
                peak_bytes=outcome.peak_bytes,
                pool=self._pool,
                samples=(step + 1) * len(rows.prompts),
                plan=best.plan,
                stage_s={str(s): x for s, x in outcome.stage_s.items()},
            )
        )
        self._intervals += _interval(
            Spent.STEPS, self._clock, end_s, len(self._pool), step, best.plan
        )
        self._clock = end_s


def _interval(
    kind: Spent, start_s: float, end_s: float, devices: int, step: int, plan: ExecutionPlan
) -> list[Interval]:
    """None for no time."""
    if end_s <= start_s:
        return []
    return [
        Interval(kind=kind, start_s=start_s, end_s=end_s, devices=devices, step=step, plan=plan)
    ]


def _devices(plan: ExecutionPlan) -> set[DeviceId]:
    return {d for p in plan.plan.placements.values() for d in p.devices}
