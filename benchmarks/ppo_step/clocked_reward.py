"""The reward function that nereus_jax calls once a step; it takes the time, too."""

import os
from typing import Any

import clock
import work

SIZES = "PPO_STEP_SIZES"
"""Environment variable: `full` or `quick`."""


def low_tokens(
    prompts: list[str], completions: list[str], answers: list[str], metadata: list[dict[str, Any]]
) -> list[float]:
    """`work.reward` of every response; a word is a token's number."""
    sizes = work.sizes_of(os.environ[SIZES])
    responses = [[int(word) for word in text.split()] for text in completions]
    work.check_responses(sizes, responses)
    rewards = [float(work.reward(sizes, response)) for response in responses]
    clock.tick(reward=sum(rewards) / len(rewards))
    return rewards
