"""Held-out evaluation: success on prompts that training never sees.

Shapes: B rows of one batch, P prompt.
"""

import time
from typing import Any

import numpy as np

from nereus_jax.core.roles import ACTOR_GENERATE, REWARD_SCORE
from nereus_jax.data.prompts import batch
from nereus_jax.rl.rollout import Rollout
from nereus_jax.runtime import host
from nereus_jax.trainer.job import GREEDY, Job
from nereus_jax.trainer.parked import weights_at_work
from nereus_jax.trainer.rollouts import (
    assemble,
    decode_responses,
    draw_seed,
    function_rewards,
)
from nereus_jax.trainer.room import outgrows, with_more_room
from nereus_jax.trainer.state import JobState, refresh_edge


def evaluate(job: Job, state: JobState) -> tuple[Job, dict[str, Any]]:
    """Generates for the evaluation prompts, always the same ones with the same draws.

    Returns:
      The run, whose room for responses may have grown; and a row of metrics: eval_step (RL steps
      done), eval_success_rate, eval_reward_mean, eval_response_length_mean, eval_s; with
      `eval.greedy` also eval_success_rate_greedy.
    """
    start_s = time.perf_counter()
    config = job.config.eval
    for edge in job.workflow.weight_edges:
        if edge.target == ACTOR_GENERATE:
            refresh_edge(job, state, edge)
    threshold = job.config.reward.success_threshold
    job, rewards, lengths = _evaluate_prompts(job, state, config.temperature)
    row = {
        "step": state.counters.step,
        "eval_step": state.counters.step,
        "eval_success_rate": float((rewards >= threshold).mean()),
        "eval_reward_mean": float(rewards.mean()),
        "eval_response_length_mean": float(lengths.mean()),
    }
    if config.greedy:
        job, greedy, _ = _evaluate_prompts(job, state, GREEDY)
        row["eval_success_rate_greedy"] = float((greedy >= threshold).mean())
    return job, row | {"eval_s": time.perf_counter() - start_s}


def _evaluate_prompts(
    job: Job, state: JobState, temperature: float
) -> tuple[Job, np.ndarray, np.ndarray]:
    """Rewards and response lengths of all evaluation prompts."""
    num_prompts, rows = job.config.eval.num_prompts, job.evaluation_rows
    rewards: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    for first in range(0, num_prompts, rows):
        count = min(rows, num_prompts - first)
        rollout = _generate(job, state, first, count, temperature)
        while outgrows(job, rollout):
            job = with_more_room(job)
            rollout = _generate(job, state, first, count, temperature)
        rewards.append(_rewards(job, state, first, rollout))
        lengths.append(rollout.response_lengths_B)
    return job, np.concatenate(rewards), np.concatenate(lengths)


def _generate(job: Job, state: JobState, first: int, count: int, temperature: float) -> Rollout:
    """Responses to `count` prompts; a short batch is filled up with no rows."""
    rows, pad_id = job.evaluation_rows, job.inputs.tokenizer.pad_id
    samples = job.inputs.eval_prompts.take(first, count).samples
    tokens_BP, lengths_B = batch(samples, job.config.data.max_prompt_length, pad_id)
    indices_B = first + np.arange(count, dtype=np.int64)
    fill = rows - count
    with weights_at_work(job, state, ACTOR_GENERATE) as params:
        arrays = host.fetch(
            job.generate.dispatch(
                params,
                np.pad(tokens_BP, ((0, fill), (0, 0)), constant_values=pad_id),
                np.pad(lengths_B, (0, fill)),
                np.pad(indices_B, (0, fill)),
                draw_seed(job.config.seed, "evaluation"),
                job.sampling(temperature),
            )
        )
    version = state.counters.policy_version
    return assemble(tokens_BP, lengths_B, indices_B, arrays, pad_id, version)


def _rewards(job: Job, state: JobState, first: int, rollout: Rollout) -> np.ndarray:
    if job.inputs.reward_function is None:
        return _model_rewards(job, state, rollout)
    samples = job.inputs.eval_prompts.take(first, rollout.num_rows).samples
    return function_rewards(job, samples, decode_responses(job, rollout))


def _model_rewards(job: Job, state: JobState, rollout: Rollout) -> np.ndarray:
    engine = job.scores[REWARD_SCORE]
    fill = job.evaluation_rows - rollout.num_rows  # one compiled shape, also for a short batch
    prompts_B, lengths_B = (
        np.pad(x, (0, fill)) for x in (rollout.prompt_lengths_B, rollout.lengths_B)
    )
    tokens_BS = np.pad(rollout.tokens_BS, ((0, fill), (0, 0)))
    with weights_at_work(job, state, REWARD_SCORE) as params:
        outputs = host.fetch(engine.dispatch(params, tokens_BS, prompts_B, lengths_B))
    scores = engine.unpack(outputs, tokens_BS.shape[1], prompts_B, lengths_B, 1)
    return scores["rewards"][: rollout.num_rows]
