"""Per-iteration logs of real RL runs as measurements that the cost model can price.

Three runs of verl (github.com/volcengine/verl): PPO and GRPO of DeepSeek-LLM 7B on 8 MI300X
(yushengsu-thu/verl_training_log) and PPO of Qwen2.5 0.5B on one GPU (eric-haibin-lin/verl-data).
What the logs do not state is from the example scripts that the runs are named after.
"""

import csv
import dataclasses
import functools
from pathlib import Path

import numpy as np

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.hardware import Hardware
from nereus_jax.core.presets import preset
from nereus_jax.core.roles import (
    ACTOR_GENERATE,
    ACTOR_SCORE,
    ACTOR_TRAIN,
    CRITIC_SCORE,
    CRITIC_TRAIN,
    REFERENCE_SCORE,
    ModelStage,
)
from nereus_jax.planning.candidates import Candidates
from nereus_jax.planning.cost_terms import DataSync, Execution, RowFill
from nereus_jax.planning.hardware import load_hardware
from nereus_jax.planning.workload import LengthHistogram, Workload

DEEPSEEK_7B = DecoderConfig(
    num_layers=30,
    embed_dim=4096,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    mlp_dim=11008,
    vocab_size=102_400,
    tie_embeddings=False,
)
COLUMNS = {
    "t_gen": ACTOR_GENERATE,
    "t_old_log_prob": ACTOR_SCORE,
    "t_ref": REFERENCE_SCORE,
    "t_values": CRITIC_SCORE,
    "t_update_critic": CRITIC_TRAIN,
    "t_update_actor": ACTOR_TRAIN,
}
BODY_SHAPE = 6.0
"""Of the gamma distribution that response lengths below the longest are taken as: the logs have
their mean, least and largest only."""
BODY_QUANTILES = 48


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What a run was made of.

    Attributes:
      name: of the log file without its ending.
      model: sizes.
      hardware: name of the devices.
      devices: in all.
      prompts, samples: of a step.
      minibatch: rows of an update.
      micro: rows of a microbatch of one device in TRAIN.
      score_micro: the same in SCORE.
      generate_tp: of the rollout engine.
      max_prompt, max_response: where prompts and responses are cut.
      rows: how sequences lie in rows.
    """

    name: str
    model: DecoderConfig
    hardware: str
    devices: int
    prompts: int
    samples: int
    minibatch: int
    micro: int
    score_micro: int
    generate_tp: int
    max_prompt: int
    max_response: int
    rows: RowFill

    @functools.cached_property
    def machine(self) -> Hardware:
        """The devices."""
        return load_hardware(self.hardware)

    def layout(self, stage: ModelStage) -> Candidates:
        """How a model-stage was laid out: FSDP over all devices; tensor parallel rollouts."""
        total = self.prompts * self.samples
        if stage == ACTOR_GENERATE:
            dp, tp, size, flushes = self.devices // self.generate_tp, self.generate_tp, 1024, 1
        else:
            train = stage in (ACTOR_TRAIN, CRITIC_TRAIN)
            dp, tp = self.devices, 1
            rows = (self.minibatch if train else total) // dp
            size = min(self.micro if train else self.score_micro, rows)
            flushes = -(-rows // size)
        one = np.ones(1, np.int64)
        return Candidates(
            dp=dp * one,
            pp=one,
            tp=tp * one,
            microbatch_size=size * one,
            microbatches=one,
            accumulation=flushes * one,
            remat=np.array([True]),
            zero1=np.array([False]),
        )

    def execution(self, stage: ModelStage) -> Execution:
        """verl: FSDP, fused attention, a rollout engine with continuous batching."""
        return Execution(
            rows=RowFill.EXACT if stage == ACTOR_GENERATE else self.rows,
            static_slots=False,
            score_bytes=0.0,
            score_share=0.5,
            vocab_over_pp=False,
            sync=DataSync.SHARDED,
            head_passes=3.0,
        )

    @staticmethod
    def head(stage: ModelStage) -> Head:
        """What the model of a model-stage ends in."""
        return Head.SCALAR if stage in (CRITIC_SCORE, CRITIC_TRAIN) else Head.LM

    def workload(self, stage: ModelStage, row: dict[str, str]) -> Workload:
        """The work of one iteration of the log."""
        padded = self.execution(stage).rows is RowFill.PADDED
        prompt = self.max_prompt if padded else round(float(row["prompt_length_mean"]))
        clipped = float(row.get("response_length_clip_ratio") or 0.0)
        return Workload(
            prompts=self.prompts,
            samples_per_prompt=self.samples,
            prompt_lengths=LengthHistogram.constant(prompt),
            response_lengths=response_lengths(
                mean=float(row["response_length_mean"]),
                longest=int(float(row["response_length_max"])),
                share=max(clipped, 1.0 / (self.prompts * self.samples)),
            ),
            max_response_tokens=self.max_response,
            minibatch_size=self.minibatch,
        )


@functools.cache
def body_quantiles() -> np.ndarray:
    """Midpoints of equal shares of a gamma distribution with mean 1."""
    draws = np.random.default_rng(0).gamma(BODY_SHAPE, 1.0 / BODY_SHAPE, 1 << 16)
    body = np.quantile(draws, (np.arange(BODY_QUANTILES) + 0.5) / BODY_QUANTILES)
    return body / body.mean()


def response_lengths(mean: float, longest: int, share: float) -> LengthHistogram:
    """A histogram with this mean whose longest length has this share.

    Args:
      mean: tokens.
      longest: tokens.
      share: of rows as long as the longest.
    """
    body_mean = max((mean - share * longest) / (1.0 - share), 1.0)
    lengths = np.clip(np.round(body_quantiles() * body_mean), 1, longest).astype(int)
    weights: dict[int, float] = {}
    for length in lengths:
        weights[int(length)] = weights.get(int(length), 0.0) + (1.0 - share) / BODY_QUANTILES
    weights[longest] = weights.get(longest, 0.0) + share
    ordered = dict(sorted(weights.items()))
    return LengthHistogram(lengths=tuple(ordered), weights=tuple(ordered.values()))


SETUPS = (
    Setup(
        name="rl_verl_ppo_deepseek7b_8xMI300X",
        model=DEEPSEEK_7B,
        hardware="mi300x",
        devices=8,
        prompts=1024,
        samples=1,
        minibatch=256,
        micro=16,
        score_micro=32,
        generate_tp=4,
        max_prompt=512,
        max_response=512,
        rows=RowFill.EXACT,
    ),
    Setup(
        name="rl_verl_grpo_deepseek7b_8xMI300X",
        model=DEEPSEEK_7B,
        hardware="mi300x",
        devices=8,
        prompts=1024,
        samples=5,
        minibatch=256 * 5,
        micro=80,
        score_micro=160,
        generate_tp=2,
        max_prompt=512,
        max_response=1024,
        rows=RowFill.EXACT,
    ),
    Setup(
        name="rl_verl_ppo_qwen2.5-0.5b_1gpu_resp512",
        model=preset("qwen2.5-0.5b"),
        hardware="a100-80gb",  # the log does not say; "80 GB"
        devices=1,
        prompts=256,
        samples=1,
        minibatch=64,
        micro=2,
        score_micro=4,
        generate_tp=1,
        max_prompt=1024,
        max_response=512,
        rows=RowFill.PADDED,
    ),
)


def read_log(path: Path) -> list[dict[str, str]]:
    """The iterations of a log, in order."""
    lines = [x for x in path.read_text(encoding="utf-8").splitlines() if not x.startswith("#")]
    return list(csv.DictReader(lines))
