# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""What a finished step teaches: efficiencies of operation classes, and memory.

Pricing a model-stage takes more time than all else that happens at a step, so only those are priced
that are due: all in the first steps of a plan, else one a step, in turn, and any whose seconds per
token are off. A surprise is a step whose seconds are off by `SURPRISE`, both per token in
comparison with those before and against the model.

How far a model-stage's seconds scatter around what is expected, more than what is unsure of that
explains, is learned with them (`Spread`): it is the noise of its measurements, and a surprise is
half as much again.

One surprise teaches nothing: it is a step that was odd. When the same model-stage surprises twice
on end, efficiencies have changed, and the change is learned at once: a filter that has learned for
long would hardly move. The change is dealt to the classes by their shares of the seconds, not by
what was unknown of them: that a class was never quite told from another is no reason to think that
it is the one that changed.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from nereus_jax.control.offsets import Offsets, observe_setup, off_by_std
from nereus_jax.core.events import StepRecord
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.roles import ModelStage, Stage
from nereus_jax.planning.calibration import CLASSES, NOISE, Efficiencies, OperationClass, observe

YOUNG_STEPS = 4
"""Steps of a plan in which every model-stage teaches."""
SURPRISE = 0.20
"""Change of the logarithm of a model-stage's seconds per token that is looked into."""
RATE_WEIGHT = 0.2
"""Of the newest step in the average that a surprise is measured against."""
FIRST_SPREAD, MOST_SPREAD = 0.2, 0.5
"""What the model is off by before anything is known, and the most of a step that counts: one that
was odd says little of the usual."""
SPREAD_WEIGHT = 0.1
"""Of the newest step in that average, after the first ones."""
SURPRISE_SPREADS = 1.5
"""How much more than usual a surprise is off."""
CHANGE = 0.7
"""Standard deviation of the logarithm of an efficiency that has changed: by two is usual."""
GENERATE_NOISE = 0.1
"""Relative deviation of a rollout's time, whose end is one draw of the longest response."""

Seconds = Callable[[ModelStage, Efficiencies], Mapping[OperationClass, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """How far seconds of a model-stage are from what is expected, under whatever plan.

    Attributes:
      steps: that were compared.
      size: average of the logarithm of measured over expected seconds, its sign left away.
    """

    steps: int = 0
    size: float = FIRST_SPREAD

    @property
    def surprise(self) -> float:
        """From how much on a step is one."""
        return max(SURPRISE, SURPRISE_SPREADS * self.size)

    def after(self, log_ratio: float, unsure: float) -> "Spread":
        """With one more step.

        Args:
          log_ratio: that it was off by.
          unsure: relative standard deviation of what was expected.
        """
        left = math.sqrt(max(log_ratio**2 - unsure**2, 0.0))
        # What was hardly foreseen tells hardly how steps scatter.
        telling = self.size**2 / max(self.size**2 + unsure**2, 1e-12)
        weight = telling * max(SPREAD_WEIGHT, 1.0 / (self.steps + 2))
        more = min(left, MOST_SPREAD) - self.size
        return Spread(steps=self.steps + 1, size=self.size + weight * more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageHistory:
    """What the last steps of a model-stage were like, under one plan.

    Attributes:
      steps: that counted.
      rate: average of the logarithm of seconds per token.
      surprises: 1 where the last step was one.
    """

    steps: int = 0
    rate: float = 0.0
    surprises: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learned:
    """What is known after a step.

    Attributes:
      efficiencies: of operation classes.
      offsets: of setups that have run.
      spreads: of each model-stage, under whatever plan.
      history: of each model-stage, under this plan.
      changed: efficiencies that were seen to change in this step, after over before.
    """

    efficiencies: Efficiencies
    offsets: Offsets
    spreads: Mapping[ModelStage, Spread]
    history: Mapping[ModelStage, StageHistory]
    changed: Mapping[OperationClass, float] = dataclasses.field(
        default_factory=dict[OperationClass, float]
    )


def learn(before: Learned, record: StepRecord, plan: ExecutionPlan, seconds: Seconds) -> Learned:
    """Learns from a step's seconds; those of programs that just were compiled do not count.

    Args:
      before: what was known.
      record: of the step.
      plan: that it ran under.
      seconds: of a model-stage in this step by class, as these efficiencies predict it.
    """
    efficiencies, offsets = before.efficiencies, before.offsets
    spreads, history = dict(before.spreads), dict(before.history)
    changed: dict[OperationClass, float] = {}
    timed = sorted(s for s in record.stage_s if s not in record.first_after_compile)
    for number, stage in enumerate(timed):
        took_s = record.stage_s[stage]
        if not 0.0 < took_s < math.inf:
            continue
        known, spread = history.get(stage, StageHistory()), spreads.get(stage, Spread())
        prompt_tokens = 0.0 if stage.stage is Stage.GENERATE else record.prompts.mean
        rate = math.log(took_s / (prompt_tokens + record.responses.mean))
        odd = known.steps > 1 and abs(rate - known.rate) > spread.surprise
        due = known.steps < YOUNG_STEPS or record.step % len(timed) == number
        modelled: Mapping[OperationClass, float] = {}
        if due or odd:
            modelled = seconds(stage, efficiencies)
        if sum(modelled.values()) <= 0:
            history[stage] = _after(known, rate)
            continue
        noise = max(GENERATE_NOISE if stage.stage is Stage.GENERATE else NOISE, spread.size)
        setup = plan.setup(stage)
        expected = {c: s * offsets.factor(setup) for c, s in modelled.items()}
        log_ratio = math.log(took_s / sum(expected.values()))
        surprise = odd and abs(log_ratio) > spread.surprise
        unsure = off_by_std(efficiencies, offsets, setup, expected)
        spreads[stage] = spread.after(log_ratio, unsure)
        if surprise and not known.surprises:
            history[stage] = dataclasses.replace(known, surprises=1)
        elif surprise:
            old = efficiencies
            efficiencies = after_change(old, expected, took_s, noise=noise)
            changed |= {c: changed.get(c, 1.0) * efficiencies[c] / old[c] for c in modelled}
            history[stage] = _after(StageHistory(), rate)
        else:
            efficiencies, offsets = observe_setup(
                efficiencies, offsets, setup, expected, took_s, noise
            )
            history[stage] = _after(known, rate)
    return Learned(
        efficiencies=efficiencies,
        offsets=offsets,
        spreads=spreads,
        history=history,
        changed=changed,
    )


def _after(known: StageHistory, rate: float) -> StageHistory:
    """With one more step that was no surprise."""
    weight = max(RATE_WEIGHT, 1.0 / (known.steps + 1))
    return dataclasses.replace(
        known,
        steps=known.steps + 1,
        rate=(1.0 - weight) * known.rate + weight * rate,
        surprises=0,
    )


def after_change(
    efficiencies: Efficiencies,
    seconds: Mapping[OperationClass, float],
    measured_s: float,
    *,
    noise: float = NOISE,
) -> Efficiencies:
    """What is known after a change of efficiencies that one measurement shows.

    The change is a normal variable of its own, with variance `CHANGE`^2 times a class's share of
    the seconds; what was unsure of the values before it stays unsure.

    Args:
      efficiencies: what was known before the change.
      seconds: what those predict, by class.
      measured_s: what it took.
      noise: standard deviation of the logarithm of a measurement.
    """
    total = sum(seconds.values())
    shares = np.array([seconds.get(c, 0.0) / total for c in CLASSES])
    change = dataclasses.replace(efficiencies, covariance=CHANGE**2 * np.diag(shares))
    after = observe(change, seconds, measured_s, noise=noise)
    return dataclasses.replace(after, covariance=efficiencies.covariance + after.covariance)


def corrected(
    corrections: Mapping[Stage, float], stage: Stage, temporary_bytes: float, missed_bytes: float
) -> Mapping[Stage, float]:
    """Corrections of modelled temporaries after a measured peak.

    A peak above the model counts in full, because the next step may need it; one below moves the
    correction a tenth of the way: what was measured may not be the worst.

    Args:
      corrections: so far.
      stage: what was at work on the fullest device.
      temporary_bytes: of it, as modelled with the corrections so far.
      missed_bytes: measured less modelled peak.
    """
    ratio = max((temporary_bytes + missed_bytes) / max(temporary_bytes, 1.0), 0.1)
    factor = ratio if ratio > 1.0 else ratio**0.1
    return {**corrections, stage: corrections.get(stage, 1.0) * factor}
