"""From prompts to a rollout with texts and rewards: live from the actor, or replayed from files.

Shapes: B rows, P prompt, T response, S = P + T.
"""

import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from nereus_jax.config import RunConfig
from nereus_jax.core.errors import DataError, DivergenceError, RewardError
from nereus_jax.data.prompts import PromptSample, Taken, batch
from nereus_jax.rl.rewards import call_reward
from nereus_jax.rl.rollout import Rollout
from nereus_jax.runtime import host
from nereus_jax.trainer.job import Job
from nereus_jax.trainer.state import Counters


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """The prompts of one step.

    Attributes:
      taken: prompts, and where the stream stands after them.
      samples: the prompt of each row; a prompt's rows follow each other.
      tokens_BP: right padded.
      lengths_B: of the prompts.
      sample_indices_B: number of each row among all rows ever generated in training.
    """

    taken: Taken
    samples: Sequence[PromptSample]
    tokens_BP: np.ndarray
    lengths_B: np.ndarray
    sample_indices_B: np.ndarray

    def every(self, count: int) -> "PromptBatch":
        """One row of each group of `count`: the prompts without their repetitions."""
        return dataclasses.replace(
            self,
            samples=self.samples[::count],
            tokens_BP=self.tokens_BP[::count],
            lengths_B=self.lengths_B[::count],
            sample_indices_B=self.sample_indices_B[::count],
        )


def draw_seed(seed: int, purpose: str) -> int:
    """A 32-bit seed for one purpose, so that training and evaluation never share draws."""
    return zlib.crc32(f"{seed}/{purpose}".encode())


def take_prompts(job: Job, position: int, first_sample: int) -> PromptBatch:
    """The next batch of training prompts."""
    taken = job.inputs.train_prompts.take(position, job.config.rollout.batch_size)
    count, width = job.config.rollout.samples_per_prompt, job.config.data.max_prompt_length
    samples = [sample for sample in taken.samples for _ in range(count)]
    tokens_BP, lengths_B = batch(samples, width, job.inputs.tokenizer.pad_id)
    indices = first_sample + np.arange(len(samples), dtype=np.int64)
    return PromptBatch(
        taken=taken,
        samples=samples,
        tokens_BP=tokens_BP,
        lengths_B=lengths_B,
        sample_indices_B=indices,
    )


def traced_lengths(job: Job, prompts: PromptBatch, counters: Counters) -> np.ndarray | None:
    """What `rollout.length_trace` has the responses of a step be long, [B]; None: it is not set."""
    trace, settings = job.inputs.lengths, job.config.rollout
    if trace is None:
        return None
    lengths = trace.draw(
        counters.step, settings.num_rows, settings.max_response_length, job.config.seed
    )
    return lengths[prompts.sample_indices_B - counters.samples]


def assemble(
    tokens_BP: np.ndarray,
    lengths_B: np.ndarray,
    sample_indices_B: np.ndarray,
    generated: Mapping[str, np.ndarray],
    pad_id: int,
    policy_version: int,
) -> Rollout:
    """Joins prompts and responses to contiguous right-padded rows.

    Args:
      tokens_BP: right-padded prompts.
      lengths_B: their lengths.
      sample_indices_B: what names each row's draws.
      generated: what the GENERATE engine returned; rows that only fill up are cut.
      pad_id: fills the rows' ends.
      policy_version: of the actor that generated.

    Raises:
      DivergenceError: the actor's weights are not finite or far too large.
    """
    rows, prompt_width = tokens_BP.shape
    cut = {name: x[:rows] for name, x in generated.items()}
    width = cut["tokens"].shape[1]
    columns_S = np.arange(prompt_width + width)[None, :]
    offset_BS = columns_S - lengths_B[:, None]
    response_BS = np.take_along_axis(cut["tokens"], np.clip(offset_BS, 0, width - 1), axis=1)
    prompt_BS = np.pad(tokens_BP, ((0, 0), (0, width)))
    in_response = (offset_BS >= 0) & (offset_BS < cut["lengths"][:, None])
    tokens_BS = np.where(offset_BS < 0, prompt_BS, np.where(in_response, response_BS, pad_id))
    mask_BT = np.arange(width)[None, :] < cut["lengths"][:, None]
    logprobs_BT = np.where(mask_BT, cut["logprobs"], 0.0).astype(np.float32)
    if not np.isfinite(logprobs_BT).all():
        raise DivergenceError(
            "the log-probabilities of the actor's responses are not finite: its weights have "
            "diverged; lower the learning rate or algorithm.clip, and go back to a checkpoint "
            "from before"
        )
    return Rollout(
        tokens_BS=tokens_BS.astype(np.int32),
        prompt_lengths_B=lengths_B.astype(np.int32),
        response_lengths_B=cut["lengths"].astype(np.int32),
        logprobs_BT=logprobs_BT,
        finished_B=cut["finished"].astype(bool),
        sample_indices_B=sample_indices_B.astype(np.int64),
        policy_version=policy_version,
    )


def rollout_file(directory: Path, step: int) -> Path:
    """Where the rollout of a step is recorded."""
    return directory / f"step_{step:08d}.npz"


def check_recording(config: RunConfig, first_step: int) -> None:
    """Looks for the recorded rollouts of all steps from `first_step` on, where they are replayed.

    Raises:
      DataError: one is missing.
    """
    if config.rollout.source != "recorded":
        return
    directory = Path(config.rollout.recorded_dir).expanduser()
    for step in range(first_step, config.num_steps):
        path = rollout_file(directory, step)
        if not path.is_file():
            remedy = f", or lower num_steps to {step}" if step else ""
            raise DataError(
                f"recorded rollout {path} does not exist, but num_steps={config.num_steps} asks "
                f"for it; record it first (rollout.record = True){remedy}"
            )


def replay(job: Job, prompts: PromptBatch, step: int) -> Rollout:
    """The recorded rollout of a step.

    Raises:
      DataError: it is missing, or was recorded for other prompts or sizes.
    """
    path = rollout_file(Path(job.config.rollout.recorded_dir).expanduser(), step)
    rollout = Rollout.load(path)
    width, settings = prompts.tokens_BP.shape[1], job.config.rollout
    # With room that grows, a step was recorded as wide as it had room for.
    room = rollout.response_width if settings.first_room else settings.max_response_length
    expected = (len(prompts.samples), width + min(room, settings.max_response_length))
    if rollout.tokens_BS.shape != expected:
        raise DataError(
            f"{path} holds rows of shape {rollout.tokens_BS.shape}, the run asks for {expected}; "
            f"replay it with the batch size and lengths it was recorded with"
        )
    inside = np.arange(width)[None, :] < prompts.lengths_B[:, None]
    same = np.array_equal(rollout.prompt_lengths_B, prompts.lengths_B) and np.array_equal(
        np.where(inside, rollout.tokens_BS[:, :width], 0), np.where(inside, prompts.tokens_BP, 0)
    )
    if not same:
        raise DataError(
            f"{path} was recorded for other prompts than this run takes at step {step}; replay it "
            f"with the data and the seed it was recorded with"
        )
    return rollout


def decode_responses(job: Job, rollout: Rollout) -> list[str]:
    """The text of every response, end token left out."""
    stop = set(job.inputs.stop_ids)
    texts = []
    rows = zip(rollout.tokens_BS, rollout.prompt_lengths_B, rollout.response_lengths_B, strict=True)
    for tokens, start, length in rows:
        ids = [int(t) for t in tokens[start : start + length]]
        if ids and ids[-1] in stop:
            ids.pop()
        texts.append(job.inputs.tokenizer.decode(ids))
    return texts


def function_rewards(
    job: Job, samples: Sequence[PromptSample], completions: list[str]
) -> np.ndarray:
    """Rewards [B] of the configured function: computed by process 0, the same on every process.

    Raises:
      RewardError: on every process alike.
    """
    function = job.inputs.reward_function
    assert function is not None
    answer: dict[str, object] = {}
    if job.world.is_main:
        try:
            rewards = call_reward(
                function,
                [s.prompt for s in samples],
                completions,
                [s.answer for s in samples],
                [dict(s.metadata) for s in samples],
            )
            answer = {"rewards": [float(r) for r in rewards]}
        except RewardError as error:
            answer = {"error": str(error)}
    agreed = json.loads(host.broadcast_text(json.dumps(answer)))
    if "error" in agreed:
        raise RewardError(agreed["error"])
    return np.asarray(agreed["rewards"], np.float32)
