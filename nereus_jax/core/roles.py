"""Role, Stage and their pair, ModelStage: one model in one stage of the RL step."""

import dataclasses
import enum


class Role(enum.StrEnum):
    """Which model: the four that RL post-training runs."""

    ACTOR = "actor"
    CRITIC = "critic"
    REFERENCE = "reference"
    REWARD = "reward"


class Stage(enum.StrEnum):
    """What a model does in a step. A position in a pipeline is a `pp_rank`, never a stage."""

    GENERATE = "GENERATE"
    SCORE = "SCORE"
    TRAIN = "TRAIN"


@dataclasses.dataclass(frozen=True, order=True)
class ModelStage:
    """One model in one stage, written `actor-TRAIN`."""

    role: Role
    stage: Stage

    def __str__(self) -> str:
        return f"{self.role.value}-{self.stage.value}"

    @classmethod
    def parse(cls, text: str) -> "ModelStage":
        """Reads `role-STAGE`.

        Raises:
          ValueError: the text names no role and stage.
        """
        role, _, stage = text.partition("-")
        try:
            return cls(Role(role.lower()), Stage(stage.upper()))
        except ValueError:
            raise ValueError(
                f"unknown model-stage {text!r}; roles are {[r.value for r in Role]}, stages are "
                f"{[s.value for s in Stage]}, written like 'actor-TRAIN'"
            ) from None


ACTOR_GENERATE = ModelStage(Role.ACTOR, Stage.GENERATE)
ACTOR_SCORE = ModelStage(Role.ACTOR, Stage.SCORE)
ACTOR_TRAIN = ModelStage(Role.ACTOR, Stage.TRAIN)
CRITIC_SCORE = ModelStage(Role.CRITIC, Stage.SCORE)
CRITIC_TRAIN = ModelStage(Role.CRITIC, Stage.TRAIN)
REFERENCE_SCORE = ModelStage(Role.REFERENCE, Stage.SCORE)
REWARD_SCORE = ModelStage(Role.REWARD, Stage.SCORE)
