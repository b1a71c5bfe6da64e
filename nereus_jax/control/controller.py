"""From events to decisions: `Controller.on_event(state, event) -> (state, decision)`.

It is pure. What it knows is in the state, what it asks is a cost function without memory, and the
clock is that of the events: the same events give the same decisions, in a running job as in a
simulated one, in every process and after every resume.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from nereus_jax.control.costs import Beliefs, CostFunction
from nereus_jax.control.expectation import forecast_of, seen_workload, with_length
from nereus_jax.control.forecast import Forecast, largest_length
from nereus_jax.control.learning import Learned, corrected, learn
from nereus_jax.control.monitor import (
    EFFICIENCY,
    LENGTH_MEAN,
    LENGTH_TAIL,
    MEMORY_FORECAST,
    OUT_OF_MEMORY,
    PEAK_MEMORY,
    PERIOD,
    POOL,
    crossings,
    with_first_references,
)
from nereus_jax.control.replan import Replan, replan
from nereus_jax.control.settings import ControllerSettings
from nereus_jax.control.state import ControllerState, PlanFacts, plan_devices
from nereus_jax.core.devices import DeviceId
from nereus_jax.core.errors import ConfigError
from nereus_jax.core.events import (
    Decision,
    DevicesJoined,
    DevicesLost,
    Event,
    Halt,
    Keep,
    OutOfMemory,
    Revocation,
    StepFinished,
    StepRecord,
    TransitionEnded,
)
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.roles import Stage
from nereus_jax.planning.calibration import OperationClass

WARM_UP_STEPS = 8
"""Steps of a run before which efficiencies are no signals: until then they are found out, not
changed."""
SURE_SIGMAS = 2.5
"""Standard deviations of an efficiency's logarithm that a change of it must have to count."""
MOST_FAILED = 8
"""Plans that could not be reached, as many as are remembered."""
REFUSED_GROWTH = 1.05
"""By how much the foreseen longest response must have grown before memory is looked for again,
where there was none."""
LARGEST_RATIO = 10.0
"""Of measured and modelled seconds of a transition, in either direction, that is believed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Controller:
    """Decides for a job.

    Attributes:
      settings: what does not change.
      costs: plans and prices.
    """

    settings: ControllerSettings
    costs: CostFunction

    def on_event(self, state: ControllerState, event: Event) -> tuple[ControllerState, Decision]:
        """What becomes of an event.

        Args:
          state: what was known before it.
          event: what happened.

        Returns:
          What is known now, and what is to be done.

        Raises:
          ConfigError: devices leave that the pool does not have.
        """
        state = dataclasses.replace(state, time_s=max(state.time_s, event.time_s))
        if isinstance(event, StepFinished):
            return self._on_step(state, event.record)
        if isinstance(event, TransitionEnded):
            return self._on_transition(state, event)
        if isinstance(event, OutOfMemory):
            return self._on_full(state, event)
        if isinstance(event, DevicesJoined):
            return self._on_joined(state, event)
        return self._on_leaving(state, event)

    def _on_step(
        self, state: ControllerState, record: StepRecord
    ) -> tuple[ControllerState, Decision]:
        state = self._after_step(state, record)
        if state.pending is not None:
            return state, Keep()
        if state.facts is None:
            state = dataclasses.replace(state, facts=self._facts(state, record))
        values = self._values(state)
        signals = state.signals
        if state.plan_steps == 1:  # another plan has another peak: no drift
            signals = {n: s for n, s in signals.items() if n != PEAK_MEMORY}
        signals = with_first_references(signals, values, state.step)
        state = dataclasses.replace(state, signals=signals)
        forecast = forecast_of(self.settings, state)
        triggers = self._triggers(state, values, forecast)
        if not triggers:
            return state, Keep()
        return self._replan(state, triggers)

    def _after_step(self, state: ControllerState, record: StepRecord) -> ControllerState:
        workload = seen_workload(self.settings, record)
        beliefs = state.beliefs
        learned = learn(
            Learned(
                efficiencies=beliefs.efficiencies,
                offsets=beliefs.offsets,
                spreads=beliefs.spreads,
                history=state.history,
            ),
            record,
            state.plan,
            lambda stage, efficiencies: self.costs.stage_seconds(
                state.plan,
                stage,
                workload,
                dataclasses.replace(beliefs, efficiencies=efficiencies),
            ),
        )
        limit = self.settings.thresholds.efficiency
        jumped = tuple(
            EFFICIENCY + c.value for c, ratio in learned.changed.items() if abs(ratio - 1) > limit
        )
        if not self.settings.policy.on_thresholds:
            jumped = ()
        return dataclasses.replace(
            state,
            step=record.step + 1,
            noticed=tuple(dict.fromkeys((*state.noticed, *jumped))),
            lengths=state.lengths.after(
                record.responses,
                record.prompts,
                self.settings.history_steps,
                self.settings.workload_steps,
            ),
            beliefs=dataclasses.replace(
                beliefs,
                efficiencies=learned.efficiencies,
                offsets=learned.offsets,
                spreads=learned.spreads,
            ),
            history=learned.history,
            plan_steps=state.plan_steps + 1,
            peak_bytes=max(state.peak_bytes, record.peak_memory_bytes),
            room_tokens=record.room_tokens or record.responses.longest,
        )

    def _facts(self, state: ControllerState, record: StepRecord) -> PlanFacts:
        """Of a plan that has run its first step."""
        cut = self.settings.workload.max_response_tokens
        workload = seen_workload(self.settings, record)
        price = self.costs.price(state.plan, workload, state.pool, state.beliefs)
        total = sum(price.seconds_by_class.values())
        counting = [
            operation.value
            for operation, seconds in price.seconds_by_class.items()
            if seconds >= self.settings.least_share * total
        ]
        limit = cut
        if self.settings.policy.foresees:
            # A histogram that is as short as can be: memory asks for the longest row alone.
            shortest = with_length(workload, 1)

            def num_bytes(tokens: int) -> float:
                longer = dataclasses.replace(shortest, max_response_tokens=tokens)
                return self.costs.peak_bytes(state.plan, longer, state.pool, state.beliefs)

            limit = largest_length(num_bytes, price.limit_bytes, 1, cut)
        return PlanFacts(limit_tokens=limit, classes=tuple(sorted(counting)))

    def _values(self, state: ControllerState) -> dict[str, float]:
        """What the signals are now."""
        few = self.settings.smoothing_steps
        values = {
            LENGTH_MEAN: statistics.median(state.lengths.mean[-few:]),
            LENGTH_TAIL: statistics.median(state.lengths.p95[-few:]),
        }
        if state.peak_bytes:
            values[PEAK_MEMORY] = float(state.peak_bytes)
        if state.facts is not None and state.step >= WARM_UP_STEPS:
            known = state.beliefs.efficiencies
            values |= {EFFICIENCY + c: known[OperationClass(c)] for c in state.facts.classes}
        return values

    def _triggers(
        self, state: ControllerState, values: dict[str, float], forecast: Forecast | None
    ) -> list[str]:
        policy = self.settings.policy
        triggers = list(state.noticed)
        if policy.on_thresholds:
            crossed = crossings(state.signals, values, self.settings.thresholds)
            triggers += [name for name in crossed if self._sure(state, name)]
        if policy.foresees and forecast is not None and state.facts is not None:
            bound = forecast.tail_bound(self.settings.forecast.lead_steps)
            known = bound <= state.refused_tokens * REFUSED_GROWTH
            if forecast.crossing_step(state.facts.limit_tokens) is not None and not known:
                triggers.append(MEMORY_FORECAST)
        if policy.every and state.step - state.last_replan >= policy.every:
            triggers.append(PERIOD)
        return triggers

    @staticmethod
    def _sure(state: ControllerState, name: str) -> bool:
        """Whether a deviation is more than doubt: a class that measurements hardly tell from
        another one wanders without having changed."""
        if not name.startswith(EFFICIENCY):
            return True
        operation = OperationClass(name.removeprefix(EFFICIENCY))
        known = state.beliefs.efficiencies
        change = abs(math.log(known[operation] / state.signals[name].reference))
        return change > SURE_SIGMAS * known.log_std(operation)

    def _on_full(
        self, state: ControllerState, event: OutOfMemory
    ) -> tuple[ControllerState, Decision]:
        """What no plan had memory for once may be looked for again: it is needed now."""
        if state.pending is not None or not self.settings.policy.foresees:
            return state, Keep()
        state = dataclasses.replace(
            state, room_tokens=max(event.room_tokens, state.room_tokens), refused_tokens=0.0
        )
        return self._replan(state, [OUT_OF_MEMORY])

    def _larger(
        self, target: ExecutionPlan, state: ControllerState, event: TransitionEnded
    ) -> Beliefs:
        """What is known when programs of a target need more than modelled: else plans that are as
        large would be tried in turn."""
        beliefs = state.beliefs
        needed = {s: n for s, n in event.working_bytes.items() if n and s in target.plan}
        if not needed or not event.room_tokens:
            return beliefs
        seen = with_length(self.settings.workload, event.room_tokens)
        price = self.costs.price(target, seen, state.pool, beliefs)
        ratios: dict[Stage, float] = {}
        for stage, num_bytes in needed.items():
            ratio = num_bytes / max(price.stages[stage].working_bytes, 1.0)
            ratios[stage.stage] = max(ratios.get(stage.stage, 1.0), ratio)
        factors = beliefs.corrections
        for kind, ratio in ratios.items():
            factors = corrected(factors, kind, 1.0, ratio - 1.0)
        return dataclasses.replace(beliefs, corrections=factors)

    def _on_transition(
        self, state: ControllerState, event: TransitionEnded
    ) -> tuple[ControllerState, Decision]:
        beliefs, failed = state.beliefs, state.failed
        if event.error and state.pending is not None:
            failed = (*failed, state.pending)[-MOST_FAILED:]
            beliefs = self._larger(state.pending, state, event)
        elif state.pending_s > 0:
            beliefs = dataclasses.replace(
                beliefs,
                transition_ratio=_ratio(
                    beliefs.transition_ratio, event.seconds - event.compile_s, state.pending_s
                ),
            )
        same = event.plan == state.plan
        state = dataclasses.replace(
            state,
            plan=event.plan,
            pending=None,
            pending_s=0.0,
            halted=False,
            beliefs=beliefs,
            history=state.history if same else {},
            plan_steps=state.plan_steps if same else 0,
            peak_bytes=state.peak_bytes if same else 0,
            facts=state.facts if same else None,
            refused_tokens=state.refused_tokens if same else 0.0,
            failed=failed,
            moves=state.moves if event.error else state.moves + 1,
        )
        if state.missing(state.usable.devices):
            return self._replan(state, [POOL])
        return state, Keep()

    def _on_joined(
        self, state: ControllerState, event: DevicesJoined
    ) -> tuple[ControllerState, Decision]:
        new = set(event.devices)
        state = dataclasses.replace(
            state,
            pool=state.pool.joined(new),
            leaving={d: s for d, s in state.leaving.items() if d not in new},
        )
        if state.halted:
            return self._replan(state, [POOL])
        return self._notice(state), Keep()

    def _on_leaving(
        self, state: ControllerState, event: DevicesLost | Revocation
    ) -> tuple[ControllerState, Decision]:
        _check_there(state, event.devices)
        going = frozenset(event.devices)
        announced = isinstance(event, DevicesLost) and going <= state.leaving.keys()
        if isinstance(event, DevicesLost):
            state = dataclasses.replace(
                state,
                pool=state.pool.without(going),
                leaving={d: s for d, s in state.leaving.items() if d not in going},
            )
            surprised = not going.isdisjoint(plan_devices(state.plan))
            state = dataclasses.replace(state, losses=state.losses + surprised)
        else:
            gone_at_s = event.time_s + event.deadline_s
            state = dataclasses.replace(
                state, leaving={**state.leaving, **dict.fromkeys(going, gone_at_s)}
            )
        if not len(state.usable):
            state = dataclasses.replace(state, halted=True, pending=None, pending_s=0.0)
            return state, _no_devices(state)
        target = state.pending
        if target is not None:
            if going.isdisjoint(plan_devices(target)):
                # What is under way leads away from these devices, or they are not needed.
                return state if announced else self._notice(state), Keep()
            state = dataclasses.replace(state, pending=None, pending_s=0.0)
        if target is not None or state.missing(state.usable.devices):
            return self._replan(state, [POOL])
        # That devices go when their time is over is no change: they were done without since then.
        return state if announced else self._notice(state), Keep()

    def _notice(self, state: ControllerState) -> ControllerState:
        if not self.settings.policy.on_pool or POOL in state.noticed:
            return state
        return dataclasses.replace(state, noticed=(*state.noticed, POOL))

    def _replan(
        self, state: ControllerState, triggers: Sequence[str]
    ) -> tuple[ControllerState, Decision]:
        values = self._values(state) if state.lengths.mean else {}
        return replan(
            Replan(
                settings=self.settings,
                costs=self.costs,
                state=state,
                triggers=tuple(dict.fromkeys(triggers)),
                values=values,
            )
        )


def _ratio(before: float, measured_s: float, modelled_s: float) -> float:
    """Half way, in logarithms, to what was just measured; `modelled_s` has `before` in it."""
    measured = max(measured_s, 1e-9) / modelled_s
    after = before * min(max(measured, 1.0 / LARGEST_RATIO), LARGEST_RATIO) ** 0.5
    return min(max(after, 1.0 / LARGEST_RATIO), LARGEST_RATIO)


def _check_there(state: ControllerState, devices: Sequence[DeviceId]) -> None:
    there = set(state.pool.devices)
    unknown = sorted(d for d in devices if d not in there)
    if unknown:
        raise ConfigError(
            f"pool event: {', '.join(map(str, unknown))} cannot leave, the pool of "
            f"{len(state.pool)} devices does not have it; name devices of the pool"
        )


def _no_devices(state: ControllerState) -> Halt:
    alive = len(state.pool)
    return Halt(
        reason=("no device is left" if not alive else "all devices that are left will be gone")
        + "; start the run again in the same directory when there are devices: it resumes from "
        "its last checkpoint",
        checkpoint=alive > 0,
    )
