"""A run on the simulated cluster: the live controller on a virtual clock.

    boundary: pool events -> a transition that is due -> a step -> StepFinished -> decision

Steps take the ground truth's seconds, transitions too; the controller sees `StepRecord` and pool
events, and decides with its own beliefs. A transition whose plan has to be compiled first waits
while steps go on under the old plan, as long as that plan can go on and is not so slow that it is
better to stand still: until devices go, or until a step is foreseen that it may have no memory for.
"""

import dataclasses
from collections.abc import Callable

from nereus_jax.control.controller import Controller
from nereus_jax.control.costs import Beliefs
from nereus_jax.control.expectation import forecast_of
from nereus_jax.control.state import ControllerState, initial_state
from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.events import (
    DevicesLost,
    Event,
    Halt,
    LengthSummary,
    Revocation,
    StepFinished,
    StepRecord,
    Transition,
    TransitionEnded,
)
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.roles import ModelStage
from nereus_jax.core.transition import TransitionGraph
from nereus_jax.simulator.cluster import StepOutcome
from nereus_jax.simulator.ledger import (
    Interval,
    OutOfMemory,
    RunResult,
    Spent,
    StepRow,
)
from nereus_jax.simulator.moves import (
    Compiled,
    checkpoint_s,
    compilation,
    restart_s,
    transition_s,
)
from nereus_jax.simulator.player import Player, PoolEvent
from nereus_jax.simulator.scenario import Rules, Scenario, roomier_plan
from nereus_jax.simulator.stage_run import StepRows

MOST_RESTARTS = 50
"""Of one run by a lack of memory; then it has failed."""
OOM_SHARE = 0.5
"""Of a step that is over when it runs out of memory."""

Watch = Callable[[TransitionGraph], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pending:
    """A transition that was decided.

    Attributes:
      decision: it.
      ready_s: when its programs are there.
    """

    decision: Transition
    ready_s: float


def simulate(
    scenario: Scenario,
    rules: Rules,
    plan: ExecutionPlan,
    *,
    beliefs: Beliefs | None = None,
    watch: Watch | None = None,
) -> RunResult:
    """Runs a policy through a scenario.

    Args:
      scenario: job, cluster and trace.
      rules: the policy.
      plan: the first plan, on devices that the trace starts with.
      beliefs: what the controller knows at the start; None: what the scenario says.
      watch: sees the graph of every transition that is carried out.

    Raises:
      ConfigError: the trace does not fit the cluster.
    """
    return _Run(scenario, rules, plan, beliefs, watch).result()


class _Run:
    """The state of a run; one object, one run."""

    def __init__(
        self,
        scenario: Scenario,
        rules: Rules,
        plan: ExecutionPlan,
        beliefs: Beliefs | None,
        watch: Watch | None,
    ) -> None:
        self._scenario, self._rules, self._watch = scenario, rules, watch
        cluster = scenario.cluster
        self._player = Player(scenario.trace, cluster, cluster.seed)
        gone = set(cluster.pool.devices) - set(self._player.first)
        pool = cluster.pool.without(gone)
        plan.plan.check_pool(pool)
        self._controller = Controller(settings=rules.settings, costs=scenario.costs)
        self._state: ControllerState = initial_state(plan, pool, beliefs or scenario.beliefs)
        self._compiled: Compiled = compilation(cluster, plan, frozenset()).programs
        self._fresh: frozenset[ModelStage] = frozenset(plan.choices)
        self._pending: _Pending | None = None
        self._halt, self._save = "", False
        self._consumed = False  # an update broke off: the state before it is no more
        self._clock, self._step, self._plan_steps = 0.0, 0, 0
        self._since_checkpoint: list[float] = []
        self._steps: list[StepRow] = []
        self._intervals: list[Interval] = []
        self._decisions: list[dict[str, object]] = []
        self._oom: list[OutOfMemory] = []
        self._moves, self._failure = 0, ""
        self._started_with = pool

    def result(self) -> RunResult:
        """Runs all steps."""
        while self._step < self._scenario.trace.steps and not self._failure:
            self._take(self._player.pop(self._step, self._clock, 0.0, self._clock))
            if self._halt:
                self._wait()
                continue
            if self._pending is not None and self._is_due():
                self._move()
                continue
            self._run_step()
        return RunResult(
            policy=self._rules.name,
            seed=self._scenario.cluster.seed,
            steps=tuple(self._steps),
            intervals=tuple(self._intervals),
            decisions=tuple(self._decisions),
            transitions=self._moves,
            out_of_memory=tuple(self._oom),
            failure=self._failure,
            beliefs=self._state.beliefs,
        )

    @property
    def _plan(self) -> ExecutionPlan:
        return self._state.plan

    @property
    def _is_whole(self) -> bool:
        return not self._consumed and not self._state.missing(self._state.pool.devices)

    def _spend(self, kind: Spent, seconds: float) -> None:
        if seconds <= 0.0:
            return
        self._intervals.append(
            Interval(
                kind=kind,
                start_s=self._clock,
                end_s=self._clock + seconds,
                devices=len(self._state.pool),
                step=self._step,
                plan=self._plan,
            )
        )
        self._clock += seconds

    def _take(self, events: list[PoolEvent]) -> None:
        for event in events:
            self._tell(event)

    def _tell(self, event: Event) -> None:
        """The controller's decision on an event becomes what is to be done next."""
        self._state, decision = self._controller.on_event(self._state, event)
        if decision.record is not None:
            self._decisions.append(dict(decision.record))
        if isinstance(decision, Transition):
            self._halt = ""
            made = compilation(self._scenario.cluster, decision.target, self._compiled)
            self._pending = _Pending(decision=decision, ready_s=self._clock + made.seconds)
        elif isinstance(decision, Halt):
            self._halt, self._pending = decision.reason, None
            self._save = decision.checkpoint and self._is_whole
        elif self._state.pending is None:
            self._pending = None

    def _wait(self) -> None:
        """For devices, while the job is ended."""
        if self._save:
            self._spend(Spent.CHECKPOINTS, checkpoint_s(self._scenario.cluster, self._plan))
            self._since_checkpoint, self._save = [], False
        at_s, events = self._player.skip(self._step, self._clock)
        if not events:
            self._failure = f"step {self._step}: {self._halt}"
            return
        self._spend(Spent.WAITING, at_s - self._clock)
        self._take(events)

    def _is_due(self) -> bool:
        """Whether the transition comes before the next step."""
        assert self._pending is not None
        decision = self._pending.decision
        if self._clock >= self._pending.ready_s or self._state.missing(self._state.pool.devices):
            return True
        if decision.by_checkpoint or decision.at_once:
            return True
        if decision.deadline_s is not None:
            return self._is_late(decision, self._clock)
        return decision.urgent and self._may_not_fit()

    def _may_not_fit(self) -> bool:
        """Whether the next step may be the one that the plan has no memory for."""
        state = self._state
        forecast = forecast_of(self._rules.settings, state)
        if forecast is None or state.facts is None:
            return True
        coming = forecast.crossing_step(state.facts.limit_tokens)
        return coming is None or coming <= 1

    def _is_late(self, decision: Transition, now_s: float) -> bool:
        """Whether another step from now on would leave too little time for the transition."""
        assert decision.deadline_s is not None
        last_s = self._steps[-1].step_s if self._steps else 0.0
        margin = self._rules.settings.deadline_margin
        return now_s + last_s + margin * self._state.pending_s > decision.deadline_s

    def _run_step(self) -> None:
        cluster = self._scenario.cluster
        rows = self._scenario.rows(self._step)
        self._started_with = self._state.pool
        compiling = self._pending is not None and self._pending.ready_s > self._clock
        slowdown = 1.0 + cluster.truth.overheads.compile_slowdown * compiling
        moment = cluster.moment(rows, self._step, self._clock, slowdown)
        outcome = cluster.run_step(self._plan, moment, self._plan_steps)
        if outcome.out_of_memory:
            self._run_out_of_memory(outcome, rows)
            return
        start_s, whole_s = self._clock, outcome.step_s
        if self._broken_off(start_s, outcome):
            return
        self._spend(Spent.STEPS, start_s + whole_s - self._clock)
        self._count(outcome, rows, start_s)

    def _broken_off(self, start_s: float, outcome: StepOutcome) -> bool:
        """Plays what happens while a step runs; True: it does not come to its end."""
        step_s = outcome.step_s
        while True:
            at_s = self._player.next_time(self._step, start_s, step_s)
            if at_s == float("inf"):
                return False
            events = self._player.pop(self._step, start_s, step_s, at_s)
            here, self._clock = self._clock, at_s
            self._take(events)
            if self._is_stopped(events, start_s + step_s):
                self._clock = here
                self._spend(Spent.DROPPED, at_s - start_s)
                self._consumed = self._consumed or outcome.updates_at(at_s - start_s)
                return True
            self._clock = here

    def _is_stopped(self, events: list[PoolEvent], end_s: float) -> bool:
        """Whether the step cannot go on: its devices are gone, or there is no time to finish it."""
        if any(isinstance(e, DevicesLost) for e in events) and self._state.missing(
            self._state.pool.devices
        ):
            return True
        if self._halt:
            return True
        if not any(isinstance(e, Revocation) for e in events) or self._pending is None:
            return False
        decision = self._pending.decision
        return decision.deadline_s is not None and (
            end_s + self._rules.settings.deadline_margin * self._state.pending_s
            > decision.deadline_s
        )

    def _count(self, outcome: StepOutcome, rows: StepRows, start_s: float) -> None:
        """A step has come to its end."""
        responses = LengthSummary.of(int(x) for x in rows.responses)
        step_s = self._clock - start_s
        self._steps.append(
            StepRow(
                step=self._step,
                start_s=start_s,
                step_s=step_s,
                mean_tokens=responses.mean,
                p95_tokens=responses.p95,
                longest_tokens=responses.longest,
                peak_bytes=outcome.peak_bytes,
                pool=self._started_with,
                samples=(self._step + 1) * len(rows.prompts),
                plan=self._plan,
                stage_s={str(s): x for s, x in outcome.stage_s.items()},
            )
        )
        record = StepRecord(
            step=self._step,
            time_s=self._clock,
            step_s=step_s,
            stage_s=outcome.stage_s,
            responses=responses,
            prompts=LengthSummary.of(int(x) for x in rows.prompts),
            peak_memory_bytes=outcome.peak_bytes,
            room_tokens=outcome.room_tokens,
            tokens=int(rows.prompts.sum() + rows.responses.sum()),
            first_after_compile=self._fresh,
        )
        self._fresh = frozenset()
        self._step += 1
        self._plan_steps += 1
        self._since_checkpoint.append(step_s)
        if len(self._since_checkpoint) >= self._scenario.checkpoint_every:
            self._spend(Spent.CHECKPOINTS, checkpoint_s(self._scenario.cluster, self._plan))
            self._since_checkpoint = []
        self._tell(StepFinished(record=record))

    def _move(self) -> None:
        """Carries a transition out."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        source, target = self._plan, pending.decision.target
        cluster = self._scenario.cluster
        compile_s = max(pending.ready_s - self._clock, 0.0)
        self._spend(Spent.COMPILING, compile_s)
        self._compiled = compilation(cluster, target, self._compiled).programs
        if pending.decision.by_checkpoint or self._rules.by_checkpoint or self._consumed:
            self._restart(target, compile_s)
            return
        start_s = self._clock
        lost = self._state.missing(self._state.pool.devices)
        try:
            graph, later_s = self._scenario.costs.graph(source, target, self._state.beliefs, lost)
        except InfeasiblePlanError as error:
            self._tell(
                TransitionEnded(time_s=self._clock, plan=source, seconds=0.0, error=str(error))
            )
            return
        if self._watch is not None:
            self._watch(graph)
        seconds = transition_s(cluster, graph, self._state.beliefs.efficiencies, start_s) + later_s
        self._spend(Spent.TRANSITIONS, seconds)
        self._moved(target, compile_s + seconds, compile_s)

    def _moved(self, target: ExecutionPlan, seconds: float, compile_s: float) -> None:
        changed = {
            s
            for s, c in target.choices.items()
            if self._plan.choices.get(s) != c or self._plan.plan[s] != target.plan[s]
        }
        self._fresh = self._fresh | frozenset(changed)
        self._plan_steps = 0
        self._moves += 1
        self._tell(
            TransitionEnded(time_s=self._clock, plan=target, seconds=seconds, compile_s=compile_s)
        )

    def _restart(self, target: ExecutionPlan, compile_s: float) -> None:
        """A new job under a plan, from a checkpoint of what is whole, or else from the last one."""
        whole, self._consumed = self._is_whole, False
        seconds = restart_s(self._scenario.cluster, self._plan, target, write=whole)
        self._spend(Spent.RESTARTING, seconds)
        if whole:
            self._since_checkpoint = []
        else:
            self._spend(Spent.REPEATING, sum(self._since_checkpoint))
        self._moved(target, compile_s + seconds, compile_s)

    def _run_out_of_memory(self, outcome: StepOutcome, rows: StepRows) -> None:
        """The job ends, and starts again from its last checkpoint under a plan that has room."""
        self._oom.append(
            OutOfMemory(
                step=self._step,
                plan=self._plan,
                room_tokens=outcome.room_tokens,
                prompt_tokens=int(rows.prompts.max()),
                used_bytes=outcome.used_bytes,
            )
        )
        self._spend(Spent.DROPPED, OOM_SHARE * outcome.step_s)
        target = roomier_plan(self._scenario, self._rules.settings, self._state, rows)
        if target is None or len(self._oom) > MOST_RESTARTS:
            short = (outcome.used_bytes - outcome.capacity_bytes) / 2**30
            self._failure = (
                f"step {self._step}: responses of {int(rows.responses.max())} tokens fit no plan "
                f"on {len(self._state.usable)} devices; the last one was {short:.1f} GiB short of "
                f"a device; use more or larger devices, or cut responses"
            )
            return
        cluster = self._scenario.cluster
        made = compilation(cluster, target, self._compiled)
        self._compiled, self._pending = made.programs, None
        self._spend(Spent.COMPILING, made.seconds)
        self._spend(Spent.RESTARTING, restart_s(cluster, self._plan, target, write=False))
        self._spend(Spent.REPEATING, sum(self._since_checkpoint))
        self._moved(target, 0.0, 0.0)
