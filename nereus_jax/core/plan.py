"""Placement (a layout on given devices) and Plan (model-stage -> placement)."""

import dataclasses
import functools
from collections.abc import Mapping

from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.roles import ModelStage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """A layout on devices. Device (d, p, t) of the layout is `devices[(d * pp + p) * tp + t]`."""

    layout: ParallelLayout
    devices: tuple[DeviceId, ...]

    def __post_init__(self) -> None:
        if len(self.devices) != self.layout.num_devices:
            raise InfeasiblePlanError(
                f"layout {self.layout} needs {self.layout.num_devices} devices, "
                f"got {len(self.devices)}"
            )
        if len(set(self.devices)) != len(self.devices):
            raise InfeasiblePlanError(
                f"a device is listed twice in {[str(d) for d in self.devices]}"
            )

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Kept: plans of many devices are keys of many tables."""
        return hash((self.layout, self.devices))

    def replica_devices(self, dp_rank: int) -> tuple[DeviceId, ...]:
        """The pp*tp devices of one replica: those of one Elastic Model Unit."""
        size = self.layout.pp * self.layout.tp
        return self.devices[dp_rank * size : (dp_rank + 1) * size]

    def overlaps(self, other: "Placement") -> bool:
        """Whether the two share a device, and so must run one after the other."""
        return not set(self.devices).isdisjoint(other.devices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Where every model-stage of a job lives."""

    placements: Mapping[ModelStage, Placement]

    def __getitem__(self, model_stage: ModelStage) -> Placement:
        return self.placements[model_stage]

    def __contains__(self, model_stage: ModelStage) -> bool:
        return model_stage in self.placements

    def check_pool(self, pool: DevicePool) -> None:
        """Raises InfeasiblePlanError if a placement uses a device that the pool lacks."""
        alive = set(pool.devices)
        for model_stage, placement in self.placements.items():
            missing = [str(d) for d in placement.devices if d not in alive]
            if missing:
                raise InfeasiblePlanError(
                    f"{model_stage} is placed on {', '.join(missing)}, which the pool of "
                    f"{len(pool)} devices does not have; use devices of the pool or fewer of them"
                )

    def to_json(self) -> dict[str, dict[str, object]]:
        """The content of plan.json: model-stage -> {dp, pp, tp, devices}."""
        return {
            str(model_stage): {
                "dp": placement.layout.dp,
                "pp": placement.layout.pp,
                "tp": placement.layout.tp,
                "devices": [str(d) for d in placement.devices],
            }
            for model_stage, placement in sorted(self.placements.items())
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Mapping[str, object]]) -> "Plan":
        """Reads what `to_json` made.

        Raises:
          InfeasiblePlanError: an entry is not a placement; the message names the model-stage.
        """
        placements: dict[ModelStage, Placement] = {}
        for name, entry in data.items():
            try:
                if not isinstance(entry, Mapping):  # type: ignore[unnecessary-isinstance]
                    raise ValueError(f"expected dp, pp, tp and devices, got {entry!r}")
                degrees = [entry[k] for k in ("dp", "pp", "tp")]
                devices = entry["devices"]
                if not all(isinstance(x, int) for x in degrees) or not isinstance(devices, list):
                    raise ValueError(
                        f"dp, pp, tp must be integers and devices a list, got {dict(entry)}"
                    )
                placements[ModelStage.parse(name)] = Placement(
                    layout=ParallelLayout(*degrees),  # type: ignore[arg-type]
                    devices=tuple(DeviceId.parse(str(d)) for d in devices),  # type: ignore[misc]
                )
            except KeyError as error:
                raise InfeasiblePlanError(
                    f"plan entry {name!r} is not a placement: {error} is missing; it has dp, pp, "
                    f"tp and devices"
                ) from None
            except ValueError as error:
                raise InfeasiblePlanError(
                    f"plan entry {name!r} is not a placement: {error}"
                ) from None
        return cls(placements=placements)
