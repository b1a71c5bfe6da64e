"""One PPO step: the workflow's calls as work for engines, and the host's arithmetic between them.

Shapes: B rows, P prompt, T response, S = P + T.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from nereus_jax.config import AlgorithmConfig, RunConfig
from nereus_jax.core.errors import RewardError
from nereus_jax.core.roles import ACTOR_GENERATE, ACTOR_SCORE, ACTOR_TRAIN, ModelStage, Stage
from nereus_jax.core.timeline import Span
from nereus_jax.core.workflow import HostCall, StageCall
from nereus_jax.rl.advantages import gae, token_rewards, whiten
from nereus_jax.rl.losses import token_weights, truncated_importance
from nereus_jax.rl.rollout import Rollout
from nereus_jax.runtime import host
from nereus_jax.runtime.dispatch import Arrays, Finished, Work, run_wave
from nereus_jax.runtime.engines.train import TrainEngine
from nereus_jax.trainer.job import Job, old_logprobs_mode
from nereus_jax.trainer.rollouts import (
    PromptBatch,
    assemble,
    decode_responses,
    draw_seed,
    function_rewards,
    replay,
)
from nereus_jax.trainer.state import JobState, drop_edges, stage_params

Values = dict[str, Any]
"""The named values of a step: what the workflow's calls read and write."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step made.

    Attributes:
      values: the workflow's values by name.
      spans: when each model-stage ran.
    """

    values: Values
    spans: tuple[Span, ...]


def run_step(job: Job, state: JobState, prompts: PromptBatch) -> StepResult:
    """Runs the workflow once; the actor and the critic in `state` are updated.

    Calls of one wave run together where their devices are disjoint.
    """
    values: Values = {"prompts": prompts}
    spans: list[Span] = []
    for wave in job.workflow.waves():
        stage_calls = [c for c in wave if isinstance(c, StageCall)]
        host_calls = [c for c in wave if isinstance(c, HostCall)]
        replayed = _replay_instead(job, state, values, stage_calls)
        works = {
            call: _work(job, state, values, call.model_stage)
            for call in stage_calls
            if call not in replayed
        }
        for call in works:
            if call.model_stage.stage is Stage.TRAIN:
                drop_edges(job, state, call.model_stage)
        made: Values = {}
        meanwhile = functools.partial(_run_host_calls, job, state, host_calls, values, made)
        finished = run_wave(tuple(works.values()), state.counters.step, meanwhile)
        for call in works:
            result = finished[call.name]
            made[call.outputs[0]] = _collect(job, state, values, call.model_stage, result)
            spans.append(result.span)
        values |= made
    return StepResult(values=values, spans=tuple(spans))


def _run_host_calls(
    job: Job, state: JobState, calls: list[HostCall], values: Values, made: Values
) -> None:
    for call in calls:
        made[call.outputs[0]] = HOST_CALLS[call.name](job, state, values)


def _replay_instead(
    job: Job, state: JobState, values: Values, calls: list[StageCall]
) -> list[StageCall]:
    """Calls that a recording takes the place of; their outputs are put into `values`."""
    if job.config.rollout.source != "recorded":
        return []
    replayed = [c for c in calls if c.model_stage == ACTOR_GENERATE]
    for call in replayed:
        with host.together():
            values[call.outputs[0]] = replay(job, values["prompts"], state.counters.step)
    return replayed


def _work(job: Job, state: JobState, values: Values, stage: ModelStage) -> Work:
    """The launches of a model-stage in this step."""
    devices = tuple(str(d) for d in job.plan[stage].devices)
    if stage.stage is Stage.GENERATE:
        launches = (lambda: _launch_generate(job, state, values),)
    elif stage.stage is Stage.SCORE:
        launches = (lambda: _launch_score(job, state, values, stage),)
    else:
        launches = _train_launches(job, state, values["batch"], stage)
    return Work(name=str(stage), devices=devices, launches=launches)


def _launch_generate(job: Job, state: JobState, values: Values) -> Arrays:
    prompts: PromptBatch = values["prompts"]
    return job.generate.dispatch(
        stage_params(job, state, ACTOR_GENERATE),
        prompts.tokens_BP,
        prompts.lengths_B,
        prompts.sample_indices_B,
        draw_seed(job.config.seed, "rollout"),
        job.sampling(),
    )


def _launch_score(job: Job, state: JobState, values: Values, stage: ModelStage) -> Arrays:
    rollout: Rollout = values["rollout"]
    return job.scores[stage].dispatch(
        stage_params(job, state, stage),
        rollout.tokens_BS,
        rollout.prompt_lengths_B,
        rollout.lengths_B,
        rollout.response_width,
    )


def minibatch_rows(config: RunConfig, step: int) -> list[np.ndarray]:
    """Rows of every update of a step: each epoch shuffled anew, the same on every layout."""
    rows: list[np.ndarray] = []
    size = config.algorithm.minibatch_size
    for epoch in range(config.algorithm.epochs):
        generator = np.random.Generator(np.random.Philox(key=[config.seed, step * 1000 + epoch]))
        order = generator.permutation(config.rollout.batch_size)
        rows += [np.sort(order[i : i + size]) for i in range(0, len(order), size)]
    return rows


def _train_launches(
    job: Job, state: JobState, batch: "TrainBatch", stage: ModelStage
) -> tuple[Callable[[], Arrays], ...]:
    is_actor = stage == ACTOR_TRAIN
    engine: TrainEngine = job.actor_train if is_actor else job.critic_train

    def launch(rows: np.ndarray) -> Arrays:
        arrays = {name: x[rows] for name, x in batch.arrays.items()}
        arrays["weights"] = token_weights(
            batch.rollout.mask_BT[rows], job.config.algorithm.aggregation
        )
        new, metrics = engine.dispatch(
            state.actor if is_actor else state.critic,
            batch.rollout.tokens_BS[rows],
            batch.rollout.prompt_lengths_B[rows],
            batch.rollout.lengths_B[rows],
            arrays,
            {"kl_coef": batch.kl_coef},
        )
        if is_actor:
            state.actor = new
        else:
            state.critic = new
        return metrics

    return tuple(functools.partial(launch, rows) for rows in batch.minibatches)


def _collect(
    job: Job, state: JobState, values: Values, stage: ModelStage, finished: Finished
) -> Any:
    """Brings a model-stage's results to the host."""
    if stage.stage is Stage.TRAIN:
        return [host.fetch(arrays) for arrays in finished.arrays]
    arrays = host.fetch(finished.arrays[0])
    if stage.stage is Stage.GENERATE:
        prompts: PromptBatch = values["prompts"]
        return assemble(
            prompts.tokens_BP,
            prompts.lengths_B,
            prompts.sample_indices_B,
            arrays,
            job.inputs.tokenizer.pad_id,
            state.counters.policy_version,
        )
    rows = values["rollout"].num_rows
    cut = {name: x[:rows] for name, x in arrays.items()}
    return next(iter(cut.values())) if len(cut) == 1 else cut


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """What TRAIN works on, on the host.

    Attributes:
      rollout: the rows.
      arrays: [B, T] float32 by the names that the objectives read, but for the weights.
      minibatches: rows of every update, in order.
      kl_coef: weight of the KL penalty in this step.
      metrics: of the rewards and the policies' differences.
    """

    rollout: Rollout
    arrays: Mapping[str, np.ndarray]
    minibatches: list[np.ndarray]
    kl_coef: float
    metrics: Mapping[str, float]


def _rewards(job: Job, state: JobState, values: Values) -> np.ndarray:
    completions = decode_responses(job, values["rollout"])
    return function_rewards(job, values["prompts"].samples, completions)


def _advantages(job: Job, state: JobState, values: Values) -> TrainBatch:
    rollout: Rollout = values["rollout"]
    algorithm, mask_BT = job.config.algorithm, rollout.mask_BT
    rewards_B = np.asarray(values["rewards"], np.float32)
    if not np.all(np.isfinite(rewards_B)):
        raise RewardError(
            f"the reward model gave a non-finite score for sample "
            f"{int(np.argmax(~np.isfinite(rewards_B)))}; "
            f"check reward.model_path"
        )
    mode = old_logprobs_mode(job.config)
    arrays: dict[str, np.ndarray] = {"old_logprobs": rollout.logprobs_BT}
    metrics: dict[str, float] = {}
    if ACTOR_SCORE in job.scores:
        scored_BT = values["actor_scores"]["logprobs"]
        difference = np.abs(scored_BT - rollout.logprobs_BT)[mask_BT]
        metrics["rollout_train_logp_diff"] = float(difference.mean())
        metrics["entropy"] = float(values["actor_scores"]["entropy"][mask_BT].mean())
        if mode == "corrected":
            with jax.default_device(host.cpu_device()):
                correction = truncated_importance(
                    scored_BT, rollout.logprobs_BT, mask_BT, algorithm.correction_cap
                )
            arrays["correction"] = np.asarray(correction)
        arrays["old_logprobs"] = scored_BT
    has_reference = "reference_scores" in values
    ref_BT = values["reference_scores"]["logprobs"] if has_reference else arrays["old_logprobs"]
    arrays["ref_logprobs"] = ref_BT
    kl_coef = state.counters.kl_coef if algorithm.kl.place == "reward" else 0.0
    computed = prepare(
        algorithm,
        job.config.reward.clip,
        rewards_B,
        arrays["old_logprobs"],
        ref_BT,
        values["values"],
        mask_BT,
        kl_coef,
    )
    arrays |= {name: computed[name] for name in ("advantages", "returns")}
    arrays["old_values"] = values["values"]
    kl_B = np.where(mask_BT, arrays["old_logprobs"] - ref_BT, 0.0).sum(axis=1)
    success = rewards_B >= job.config.reward.success_threshold
    metrics |= {
        "reward_mean": float(rewards_B.mean()),
        "success_rate": float(success.mean()),
        "kl": float(kl_B.mean()),
        "advantage_std": float(computed["raw_advantages"][mask_BT].std()),
    }
    return TrainBatch(
        rollout=rollout,
        arrays=arrays,
        minibatches=minibatch_rows(job.config, state.counters.step),
        kl_coef=state.counters.kl_coef,
        metrics=metrics,
    )


def prepare(
    algorithm: AlgorithmConfig,
    reward_clip: float,
    rewards_B: np.ndarray,
    logprobs_BT: np.ndarray,
    ref_logprobs_BT: np.ndarray,
    values_BT: np.ndarray,
    mask_BT: np.ndarray,
    kl_coef: float,
) -> dict[str, np.ndarray]:
    """Token rewards, advantages and returns of a batch, on the host.

    Returns:
      advantages [B, T] (whitened where configured), raw_advantages [B, T], returns [B, T].
    """
    with jax.default_device(host.cpu_device()):
        computed = _prepare(
            algorithm.gamma,
            algorithm.gae_lambda,
            algorithm.kl.estimator,
            algorithm.whiten_advantages,
            reward_clip,
            rewards_B,
            logprobs_BT,
            ref_logprobs_BT,
            values_BT,
            mask_BT,
            np.float32(kl_coef),
        )
    return {name: np.asarray(x) for name, x in computed.items()}


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _prepare(
    gamma: float,
    gae_lambda: float,
    estimator: Any,
    whiten_advantages: bool,
    reward_clip: float,
    rewards_B: jax.Array,
    logprobs_BT: jax.Array,
    ref_logprobs_BT: jax.Array,
    values_BT: jax.Array,
    mask_BT: jax.Array,
    kl_coef: jax.Array,
) -> dict[str, jax.Array]:
    rewards_BT = token_rewards(
        rewards_B, logprobs_BT, ref_logprobs_BT, mask_BT, kl_coef, estimator, reward_clip
    )
    raw_BT, returns_BT = gae(rewards_BT, values_BT, mask_BT, gamma, gae_lambda)
    advantages_BT = whiten(raw_BT, mask_BT) if whiten_advantages else raw_BT
    return {
        "advantages": advantages_BT,
        "raw_advantages": raw_BT,
        "returns": returns_BT,
    }


HOST_CALLS: Mapping[str, Callable[[Job, JobState, Values], Any]] = {
    "rewards": _rewards,
    "advantages": _advantages,
}
