"""A plan with how each of its model-stages runs: what a plan file says, and what the controller
compares."""

import dataclasses
from collections.abc import Mapping

from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Plan
from nereus_jax.core.roles import ModelStage, Stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageChoice:
    """How a model-stage runs on its placement.

    Attributes:
      microbatch_size: rows in the layers at a time; GENERATE: rows that a replica decodes at a
        time, 0: all.
      microbatches: of a pipeline flush; 0: all of a replica's.
      remat: the activations of each layer are computed again in the backward pass.
      zero1: the optimizer's state is split over dp.
      parked: it waits in the host's memory while others run.
    """

    microbatch_size: int
    microbatches: int = 0
    remat: bool = False
    zero1: bool = False
    parked: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageSetup:
    """What the seconds of a model-stage's calls depend on beside its work and where its devices
    lie.

    Attributes:
      model_stage: which.
      layout: its degrees.
      choice: how it runs; not whether it is parked between calls.
    """

    model_stage: ModelStage
    layout: ParallelLayout
    choice: StageChoice


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutionPlan:
    """Where every model-stage lives, and how it runs there.

    Attributes:
      plan: the placements.
      choices: of the same model-stages.
    """

    plan: Plan
    choices: Mapping[ModelStage, StageChoice]

    def __post_init__(self) -> None:
        without = sorted(str(s) for s in self.plan.placements.keys() ^ self.choices.keys())
        if without:
            raise InfeasiblePlanError(
                f"placements and choices name different model-stages: {', '.join(without)}"
            )

    def setup(self, stage: ModelStage) -> StageSetup:
        """Of one of its model-stages."""
        choice = dataclasses.replace(self.choices[stage], parked=False)
        return StageSetup(model_stage=stage, layout=self.plan[stage].layout, choice=choice)

    def to_json(self) -> dict[str, dict[str, object]]:
        """`Plan.to_json`, with the choices beside the degrees."""
        return {
            name: {**entry, **dataclasses.asdict(self.choices[ModelStage.parse(name)])}
            for name, entry in self.plan.to_json().items()
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Mapping[str, object]]) -> "ExecutionPlan":
        """Reads what `to_json` made.

        Raises:
          InfeasiblePlanError: an entry is not what `to_json` writes; the message names the
            model-stage and the key.
        """
        plan = Plan.from_json(data)
        choices = {ModelStage.parse(name): _choice(name, entry) for name, entry in data.items()}
        return cls(plan=plan, choices=choices)


def _choice(name: str, entry: Mapping[str, object]) -> StageChoice:
    values: dict[str, int | bool] = {}
    for field in dataclasses.fields(StageChoice):
        if field.name not in entry:
            if field.default is dataclasses.MISSING:
                raise InfeasiblePlanError(f"plan entry {name!r}: {field.name} is missing")
            continue
        value = entry[field.name]
        kind, wanted = (bool, "true or false") if field.type is bool else (int, "a whole number")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise InfeasiblePlanError(
                f"plan entry {name!r}: {field.name} must be {wanted}, got {value!r}"
            )
        least = field.name == "microbatch_size" and ModelStage.parse(name).stage != Stage.GENERATE
        if not isinstance(value, bool) and value < least:
            raise InfeasiblePlanError(f"plan entry {name!r}: {field.name} must not be {value}")
        values[field.name] = value
    return StageChoice(**values)  # pyright: ignore[reportArgumentType]
