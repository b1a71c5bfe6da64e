"""How a controller is set up."""

import dataclasses

from nereus_jax.config.schema import ControlConfig
from nereus_jax.config.simulation import SimulationConfig
from nereus_jax.control.forecast import ForecastSettings
from nereus_jax.control.monitor import Prior, Thresholds
from nereus_jax.control.policies import Policy, payback
from nereus_jax.core.errors import ConfigError
from nereus_jax.planning.workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControllerSettings:
    """What does not change in a run.

    Attributes:
      workload: of a step, before any was seen: rows, minibatches, and where responses are cut.
      policy: when to look for a plan, and when to move.
      num_steps: of the run; no move is expected to be right for longer. 0: it does not end.
      thresholds: of the signals.
      forecast: how lengths are foreseen.
      prior: H_x before the first interval.
      interval_weight: of the newest interval in H_x.
      smoothing_steps: steps whose median is a signal of lengths: one odd batch is no drift.
      workload_steps: newest steps whose lengths stand for those to come.
      look_ahead_steps: steps ahead whose mean length a new plan is made for.
      plan_ahead_steps: steps for whose longest response a new plan has memory.
      least_share: of a step's seconds that an operation class must have to be a signal.
      doubt: how many times what prices are off by an optional gain must be under a policy that asks
        for payback; 0: any gain is one.
      candidates: plans that are asked of the search.
      park: in an urgent case, idle model-stages may wait in the memory of the host.
      deadline_margin: a transition must be this many times faster than the time that is left.
      history_steps: steps that are remembered.
      checkpoint_every: steps from one checkpoint to the next; 0: there is none to go back to but
        the start.
    """

    workload: Workload
    policy: Policy = dataclasses.field(default_factory=payback)
    num_steps: int = 0
    thresholds: Thresholds = dataclasses.field(default_factory=Thresholds)
    forecast: ForecastSettings = dataclasses.field(default_factory=ForecastSettings)
    prior: Prior = Prior.ELAPSED
    interval_weight: float = 0.5
    smoothing_steps: int = 3
    workload_steps: int = 4
    look_ahead_steps: int = 5
    plan_ahead_steps: int = 20
    least_share: float = 0.05
    doubt: float = 1.0
    candidates: int = 4
    park: bool = True
    deadline_margin: float = 1.5
    history_steps: int = 64
    checkpoint_every: int = 0

    def __post_init__(self) -> None:
        for name in ("smoothing_steps", "workload_steps", "candidates", "history_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"controller: {name} must be at least 1, got {getattr(self, name)}"
                )
        if not 0 <= self.doubt < float("inf"):
            raise ConfigError(f"controller: doubt must be at least 0, got {self.doubt:g}")
        if not 0 < self.interval_weight <= 1:
            raise ConfigError(
                f"controller: interval_weight must be in (0, 1], got {self.interval_weight:g}"
            )
        for field in dataclasses.fields(self.thresholds):
            value = getattr(self.thresholds, field.name)
            if not 0 < value < float("inf"):
                raise ConfigError(
                    f"controller: the threshold of {field.name} must be above 0, got {value:g}"
                )


def thresholds_of(config: ControlConfig | SimulationConfig) -> Thresholds:
    """Those of a run's or of a simulation's configuration."""
    return Thresholds(
        length=config.length_threshold,
        efficiency=config.efficiency_threshold,
        memory=config.memory_threshold,
    )
