"""What a controller asks of a cost model: plans, the price of a plan, the price of a change.

`CostFunction` is what an embedder implements; `PlannerCosts` is the one that this project's planner
is behind. All methods are pure: the same arguments give the same answer in every process.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from nereus_jax.control.learning import Spread
from nereus_jax.control.offsets import Offsets
from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.roles import ModelStage, Stage
from nereus_jax.core.transition import LinkBytes
from nereus_jax.planning.calibration import Efficiencies, OperationClass
from nereus_jax.planning.plan_price import PlanPrice
from nereus_jax.planning.workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beliefs:
    """What was learned from the run so far.

    Attributes:
      efficiencies: what is reached of the hardware's peaks.
      offsets: what was measured of setups that have run, beyond what efficiencies explain.
      spreads: of each model-stage, how far its seconds scatter.
      corrections: by stage, what modelled temporaries are multiplied with after peaks were
        measured.
      transition_ratio: measured over modelled seconds of transitions.
    """

    efficiencies: Efficiencies = dataclasses.field(default_factory=Efficiencies.prior)
    offsets: Offsets = dataclasses.field(default_factory=Offsets)
    spreads: Mapping[ModelStage, Spread] = dataclasses.field(
        default_factory=dict[ModelStage, Spread]
    )
    corrections: Mapping[Stage, float] = dataclasses.field(default_factory=dict[Stage, float])
    transition_ratio: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan that could be moved to.

    Attributes:
      plan: the plan.
      price: what it costs.
      origin: how it was found.
      risk_s: seconds a step that losses are expected to cost on top.
    """

    plan: ExecutionPlan
    price: PlanPrice
    origin: str
    risk_s: float = 0.0

    @property
    def cost_s(self) -> float:
        """Seconds of a step, losses included: what candidates are compared by."""
        return self.price.step_s + self.risk_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidates:
    """What a search found.

    Attributes:
      plans: that fit, the fastest first.
      shortage: why there is none; empty where there is one.
    """

    plans: Sequence[Candidate]
    shortage: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransitionEstimate:
    """What it would cost to get to a plan.

    Attributes:
      executable: whether there is a way that every device has the memory for at every moment.
      reason: why there is none; empty where there is one.
      seconds: L_tran: what the job loses by it, all parts: how long it stands still, and what a
        compiler beside it costs its steps.
      parts_s: what `seconds` is made of: move, setup, compile, and others.
      compile_s: of all programs that are missing, also what the job need not wait for; inf: not
        known.
      link_bytes: by kind of link.
      device_bytes: the most that units take on a device meanwhile.
    """

    executable: bool
    reason: str = ""
    seconds: float = 0.0
    parts_s: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    compile_s: float = math.inf
    link_bytes: LinkBytes = dataclasses.field(default_factory=LinkBytes)
    device_bytes: Mapping[DeviceId, int] = dataclasses.field(default_factory=dict[DeviceId, int])


class CostFunction(Protocol):
    """Prices of plans and of the ways between them."""

    def candidates(
        self,
        workload: Workload,
        pool: DevicePool,
        beliefs: Beliefs,
        *,
        current: ExecutionPlan,
        count: int,
        same_degrees: bool = False,
        surviving: bool = False,
    ) -> Candidates:
        """Plans on devices of a pool that fit, the fastest first.

        Args:
          workload: of the steps to come; `max_response_tokens` is what memory must suffice for.
          pool: the devices that may be used.
          beliefs: what was learned.
          current: the plan that runs; candidates that are near it are cheap to get to.
          count: how many are wanted.
          same_degrees: every model-stage keeps its pp and tp; only dp and devices change.
          surviving: among them plans that `PlanPrice.survives` is said of, where there are any.
        """
        ...

    def price(
        self, plan: ExecutionPlan, workload: Workload, pool: DevicePool, beliefs: Beliefs
    ) -> PlanPrice:
        """The price of a plan exactly as it is; seconds of calls are multiplied with what was
        measured of their setups (`beliefs.offsets.factors(plan)`), as in `candidates`."""
        ...

    def peak_bytes(
        self, plan: ExecutionPlan, workload: Workload, pool: DevicePool, beliefs: Beliefs
    ) -> float:
        """Of the fullest device, as `price` has it; never falls with `max_response_tokens`."""
        ...

    def stage_seconds(
        self, plan: ExecutionPlan, model_stage: ModelStage, workload: Workload, beliefs: Beliefs
    ) -> Mapping[OperationClass, float]:
        """Of all calls of one model-stage in a step, by class, as `price` has it but for the
        offset of its setup (`Beliefs.offsets`)."""
        ...

    def transition(
        self,
        source: ExecutionPlan,
        target: ExecutionPlan,
        beliefs: Beliefs,
        *,
        lost: frozenset[DeviceId] = frozenset(),
        hidden_s: float = 0.0,
        by_checkpoint: bool = False,
    ) -> TransitionEstimate:
        """What it would cost to get from one plan to another.

        Args:
          source: the plan that holds.
          target: the plan wanted.
          beliefs: what was learned.
          lost: devices that are gone.
          hidden_s: for how long the job goes on while programs are compiled for the target.
          by_checkpoint: state is written to a checkpoint, and read from it.
        """
        ...
