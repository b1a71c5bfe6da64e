"""What the planning of a transition must be told beside the two plans."""

import dataclasses
from collections.abc import Iterable, Mapping

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.devices import DeviceId
from nereus_jax.core.emu_spec import EmuSpec
from nereus_jax.core.roles import ModelStage, Role, Stage
from nereus_jax.core.transition import RecoverySource, Way
from nereus_jax.planning.transfers import MAX_INFLIGHT_BYTES

MOVING_WAYS = frozenset({Way.COMPOSED, Way.DIRECT, Way.LEAN, Way.PARKED})
"""The ways among which planning chooses where units must move."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageState:
    """What a model-stage's units consist of, and where their values may come from.

    Attributes:
      parameters: their leaves.
      optimizer: tensors that are cut like parameters (moments); None: it is not trained.
      num_kv_heads: of the model; gives the mesh of a layout.
      zero1: the optimizer's tensors are also split over dp; units cannot be told apart then, and
        all of them move in one Reshard.
      zero1_after: the same of the new units; None: as before.
      refreshed_by: the model-stage whose weight edge fills this one in every step; None, or one
        that the target does not have: it holds state of its own. With the same placement and leaves
        the two share their arrays.
      recovery: where values come from when no copy is left, the best first.
      parked_before: the old units are in host memory.
      parked_after: the new units are to be in host memory, at the places of the old ones.
    """

    parameters: EmuSpec
    optimizer: EmuSpec | None = None
    num_kv_heads: int = 1
    zero1: bool = False
    zero1_after: bool | None = None
    refreshed_by: ModelStage | None = None
    recovery: tuple[RecoverySource, ...] = ()
    parked_before: bool = False
    parked_after: bool = False

    @property
    def zero1_ends(self) -> tuple[bool, bool]:
        """Whether the optimizer's tensors are split over dp before and after."""
        return self.zero1, self.zero1 if self.zero1_after is None else self.zero1_after


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransitionBudget:
    """Memory and seconds that are not in the description of the hardware.

    Attributes:
      capacity_bytes: of single devices; the others have `Hardware.memory_bytes`.
      headroom: part of a device's memory that stays free, 0 to 1.
      buffer_bytes: send and receive buffers of a transfer on a device.
      communicator_bytes: what communicators take on a device.
      reserved_bytes: by device, what lives there and takes no part (workspaces, caches).
      host_bytes: for parked units in a node's memory, by node; None: there is enough.
      setup_s: of one operation: launch, and communicators that are not there yet.
      compile_s: compile time that nothing hides.
      storage_bytes_per_s: of reading a checkpoint, for each device that reads.
      ways: allowed where units must move; where none of them exists (only Reshard does under
        ZeRO-1), the one that does is taken.
    """

    capacity_bytes: Mapping[DeviceId, int] = dataclasses.field(default_factory=dict[DeviceId, int])
    headroom: float = 0.1
    buffer_bytes: int = MAX_INFLIGHT_BYTES
    communicator_bytes: int = 0
    reserved_bytes: Mapping[DeviceId, int] = dataclasses.field(default_factory=dict[DeviceId, int])
    host_bytes: Mapping[int, int] | None = None
    setup_s: float = 0.0
    compile_s: float = 0.0
    storage_bytes_per_s: float = 1e9
    ways: frozenset[Way] = MOVING_WAYS

    def __post_init__(self) -> None:
        if not 0 <= self.headroom < 1:
            raise ValueError(f"headroom must be in [0, 1), got {self.headroom}")


def decoder_states(
    model: DecoderConfig,
    model_stages: Iterable[ModelStage],
    *,
    weight_edges: bool = True,
    param_dtype: str = "float32",
    compute_dtype: str = "bfloat16",
    num_moments: int = 2,
    zero1: bool = False,
) -> dict[ModelStage, StageState]:
    """The states of model-stages that all have models of the same sizes.

    TRAIN holds parameters and moments, the others weights to compute with.

    Args:
      model: the sizes.
      model_stages: which there are.
      weight_edges: a model that is trained fills its copies for GENERATE and SCORE in every step;
        else these are moved as state of their own.
      param_dtype: of what is trained, and of its moments.
      compute_dtype: of the other weights.
      num_moments: of the optimizer, each as large as the parameters; two for Adam.
      zero1: the moments are split over dp.
    """
    weights = {head: model.spec(head, compute_dtype) for head in Head}
    masters = {head: model.spec(head, param_dtype) for head in Head}
    moments = {head: _moments(masters[head], num_moments) for head in Head}
    stages = tuple(model_stages)
    trains = {s.role: s for s in stages if s.stage is Stage.TRAIN}
    states: dict[ModelStage, StageState] = {}
    for stage in stages:
        head = Head.LM if stage.role in (Role.ACTOR, Role.REFERENCE) else Head.SCALAR
        trained = stage.stage is Stage.TRAIN
        states[stage] = StageState(
            parameters=masters[head] if trained else weights[head],
            optimizer=moments[head] if trained else None,
            num_kv_heads=model.num_kv_heads,
            zero1=zero1 and trained,
            refreshed_by=trains.get(stage.role) if weight_edges and not trained else None,
        )
    return states


def _moments(spec: EmuSpec, number: int) -> EmuSpec:
    leaves = [
        dataclasses.replace(leaf, name=f"{i}.{leaf.name}") for i in range(number) for leaf in spec
    ]
    return EmuSpec(leaves=tuple(leaves), rules=spec.rules)
