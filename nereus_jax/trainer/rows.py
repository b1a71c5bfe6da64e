"""The row of metrics.jsonl and the samples of one step.

Units: lengths, `response_room` and `tokens` in tokens, `kl` in nats summed over a response,
`entropy` in nats a token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nereus_jax.core.roles import ACTOR_TRAIN, CRITIC_TRAIN
from nereus_jax.core.timeline import Span
from nereus_jax.rl.rollout import Rollout
from nereus_jax.trainer.job import Job
from nereus_jax.trainer.rollouts import PromptBatch, decode_responses
from nereus_jax.trainer.step import StepResult
from nereus_jax.trainer.train_batch import TrainBatch
from nereus_jax.trainer.utilization import tflops_per_device


def _mean(metrics: Sequence[Mapping[str, np.ndarray]], name: str) -> float:
    return float(np.mean([m[name] for m in metrics]))


def step_row(
    job: Job,
    result: StepResult,
    *,
    step: int,
    step_s: float,
    edge_spans: Sequence[Span],
) -> dict[str, Any]:
    """The metrics of a step.

    Args:
      job: the run.
      result: of the step.
      step: counted from 0.
      step_s: seconds of the whole step.
      edge_spans: of the weight edges before the step.
    """
    rollout: Rollout = result.values["rollout"]
    batch: TrainBatch = result.values["batch"]
    prompts: PromptBatch = result.values["prompts"]
    actor, critic = result.values["actor_metrics"], result.values.get("critic_metrics")
    lengths = rollout.response_lengths_B
    stage_s = {span.name: span.duration_s for span in result.spans}
    park_s: dict[str, float] = {}
    for span in result.parking:
        park_s[span.name] = park_s.get(span.name, 0.0) + span.duration_s
    reached = tflops_per_device(job, rollout, stage_s)
    row: dict[str, Any] = {
        "step": step,
        "devices": len(job.world.pool),
        "entropy": _mean(actor, "entropy"),
        # Before the first update the policy is the one that sampled: what differs is numerics.
        "rollout_train_logp_diff": float(actor[0]["old_logprob_diff"]),
        **batch.metrics,
        "kl_coef": batch.kl_coef,
        "policy_loss": _mean(actor, "policy_loss"),
        "clip_fraction": _mean(actor, "clip_fraction"),
        "approx_kl": _mean(actor, "approx_kl"),
        "actor_grad_norm": _mean(actor, "grad_norm"),
        "response_length_mean": float(lengths.mean()),
        "response_length_p95": float(np.percentile(lengths, 95)),
        "response_length_max": int(lengths.max()),
        "response_room": job.room,
        "finished_fraction": float(rollout.finished_B.mean()),
        "tokens": rollout.num_tokens,
        "prompts_dropped": prompts.taken.num_dropped,
        "prompts_cut": prompts.taken.num_cut,
        "policy_version": rollout.policy_version,
        "step_s": step_s,
        "tokens_per_s": rollout.num_tokens / step_s,
        "padding_share": _padding_share(job, rollout, batch),
        "stage_s": stage_s,
        "tflops_per_device": {str(stage): x for stage, x in reached.items()},
        "park_s": park_s,
        "weight_edge_s": {span.name: span.duration_s for span in edge_spans},
        "compile_s": job.compile_cost,
        "peak_memory_bytes": job.peak_memory_bytes,
    }
    if critic is not None:
        row["value_loss"] = _mean(critic, "value_loss")
        row["critic_grad_norm"] = _mean(critic, "grad_norm")
    return row


def _padding_share(job: Job, rollout: Rollout, batch: TrainBatch) -> dict[str, float]:
    """Share of the tokens in the layers of SCORE and TRAIN that belong to no sequence."""
    length = rollout.tokens_BS.shape[1]
    prompts_B, totals_B = rollout.prompt_lengths_B, rollout.lengths_B
    packed = {stage: [e.pack(length, prompts_B, totals_B)] for stage, e in job.scores.items()}
    for stage, engine in job.trains.items():
        packed[stage] = [engine.pack(length, prompts_B[r], totals_B[r]) for r in batch.minibatches]
    return {
        str(stage): 1 - sum(p.tokens for p in parts) / sum(p.fit.run_tokens for p in parts)
        for stage, parts in packed.items()
    }


def non_finite_update(result: StepResult) -> str | None:
    """Which update had a non-finite loss or gradient, in words; None if all were finite."""
    updates = {
        str(ACTOR_TRAIN): result.values["actor_metrics"],
        str(CRITIC_TRAIN): result.values.get("critic_metrics", []),
    }
    for name, metrics in updates.items():
        for index, values in enumerate(metrics):
            if not (values["finite"] and np.isfinite(values["loss"])):
                return f"update {index + 1} of {len(metrics)} of {name}"
    return None


def sample_rows(job: Job, result: StepResult, step: int) -> list[dict[str, Any]]:
    """The first responses of a step as text."""
    count = job.config.report.samples_per_step
    rollout: Rollout = result.values["rollout"]
    rollout = rollout.take(np.arange(min(count, rollout.num_rows)))
    prompts: PromptBatch = result.values["prompts"]
    texts = decode_responses(job, rollout)
    rewards = result.values["rewards"]
    return [
        {
            "step": step,
            "sample": int(rollout.sample_indices_B[i]),
            "prompt": prompts.samples[i].text,
            "response": text,
            "answer": prompts.samples[i].answer,
            "reward": float(rewards[i]),
            "response_length": int(rollout.response_lengths_B[i]),
        }
        for i, text in enumerate(texts)
    ]
