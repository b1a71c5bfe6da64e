"""Model-stages on the page: their order and their colours."""

from collections.abc import Iterable

from nereus_jax.core.roles import (
    ACTOR_GENERATE,
    ACTOR_SCORE,
    ACTOR_TRAIN,
    CRITIC_SCORE,
    CRITIC_TRAIN,
    REFERENCE_SCORE,
    REWARD_SCORE,
)

ORDER = tuple(
    str(stage)
    for stage in (
        ACTOR_GENERATE,
        ACTOR_SCORE,
        REFERENCE_SCORE,
        CRITIC_SCORE,
        REWARD_SCORE,
        ACTOR_TRAIN,
        CRITIC_TRAIN,
    )
)
"""Model-stages as they follow each other in a step; each has a colour of its own."""
EDGES = "weight edges"


def stage_style(stage: str) -> str:
    """The class of a model-stage's colour."""
    return f"s{ORDER.index(stage)}" if stage in ORDER else "s7"


def in_order(stages: Iterable[str]) -> list[str]:
    """Model-stages in the order of a step, others behind."""
    known = {stage: place for place, stage in enumerate(ORDER)}
    return sorted(stages, key=lambda stage: (known.get(stage, len(known)), stage))
