"""Every key of a run configuration: its type, default, unit and allowed values.

The text under a field documents it. A field without a default must be given. The classes hold the
bounds and the allowed values as annotations; `nereus_jax.config.parse` enforces them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from nereus_jax.config.constraints import (
    AtLeastOne,
    Decay,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveProbability,
    Probability,
    ProblemCount,
    SeedInt,
)
from nereus_jax.config.plan_entry import PlanEntry

DType = Literal["float32", "bfloat16"]
TaskOption = bool | int | float | str | tuple[bool | int | float | str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The actor's model; critic and reference have the same sizes."""

    path: str = ""
    """Hugging Face directory; its config.json then gives the sizes and the ones here are not read.
    Empty: a model with random weights of the sizes below."""
    preset: str = ""
    """A published model, such as 'llama3-8b', whose sizes a random model takes in place of the
    ones here: to see what a run would need without its weights."""
    num_layers: NonNegativeInt = 0
    """Decoder layers; > 0 without `path`."""
    embed_dim: NonNegativeInt = 0
    """Width of the residual stream; > 0 without `path`."""
    num_heads: NonNegativeInt = 0
    """Query heads; > 0 without `path`."""
    num_kv_heads: NonNegativeInt = 0
    """Key and value heads, a divisor of `num_heads`; > 0 without `path`."""
    head_dim: NonNegativeInt = 0
    """Width of a head, even (RoPE turns pairs); > 0 without `path`."""
    mlp_dim: NonNegativeInt = 0
    """Hidden width of the MLP; > 0 without `path`."""
    vocab_size: NonNegativeInt = 0
    """Rows of the embedding; 0: as many as the tokenizer has tokens."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = True
    """Whether the output projection is the embedding."""
    max_positions: PositiveInt = 4096
    """Longest sequence (prompt and response), in tokens."""
    param_dtype: DType = "float32"
    """Type of the master weights of TRAIN: float32 or bfloat16."""
    compute_dtype: DType = "float32"
    """Type of activations and of the weights in a computation: float32 or bfloat16."""
    matmul_precision: Literal["default", "high", "highest"] = "default"
    """Precision of matrix products: default, high or highest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How text becomes tokens."""

    kind: Literal["characters", "huggingface"] = "characters"
    """characters: one token per character; huggingface: a tokenizer directory."""
    path: str = ""
    """Tokenizer directory for huggingface; empty: `model.path`."""
    characters: str = ""
    """The alphabet for characters; empty: the tokenizer's default."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompts for training and evaluation."""

    train: str
    """'task:NAME' for a procedural task, or data: a .jsonl, .jsonl.gz or .parquet file, a directory
    or a glob of them, or several of these with commas."""
    eval: str
    """The same for evaluation."""
    train_size: ProblemCount = 0
    """Problems of a training task; an epoch's order takes 8 bytes of host memory for each."""
    eval_size: ProblemCount = 0
    """Problems of an evaluation task."""
    distinct: bool = False
    """Whether a task's problems are all different; repeated ones are passed over, at the start."""
    prompt_field: str = "prompt"
    """Field of a record with the prompt: text, or a list of messages (role, content) for the chat
    template. Dots lead into nested fields, + joins several: 'Body+Question'."""
    answer_field: str = "answer"
    """Field of a record with the answer, such as 'reward_model.ground_truth'; empty: there are no
    answers."""
    chat_template: bool = False
    """Whether the tokenizer's chat template wraps a prompt."""
    system_prompt: str = ""
    """System message of the chat template, for a prompt that has none of its own."""
    prompt_suffix: str = ""
    """Text appended to every prompt, or to its last message."""
    max_prompt_length: PositiveInt
    """Longest prompt, in tokens: the P of every batch."""
    overlong: Literal["drop", "cut"] = "drop"
    """A prompt beyond `max_prompt_length`: drop it, or cut it to its last tokens."""
    task_options: Mapping[str, TaskOption] = dataclasses.field(default_factory=dict, hash=False)
    """Options of the procedural task: any key, with a bool, number, string or a list of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Where the scalar reward of a response comes from: a function or a reward model, not both."""

    function: str = ""
    """Dotted name of a reward function, 'package.module.function'."""
    model_path: str = ""
    """Hugging Face directory of a reward model (a ...ForSequenceClassification with one label); it
    reads the actor's tokens, so its tokenizer must be the same."""
    success_threshold: FiniteFloat = 1.0
    """A reward of at least this counts as a success in the metrics."""
    clip: NonNegativeFloat = 0.0
    """Rewards are clipped to [-clip, clip]; 0: not at all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Generation of responses in training."""

    batch_size: PositiveInt
    """Prompts per step."""
    samples_per_prompt: PositiveInt = 1
    """Responses to each prompt; a step has batch_size * samples_per_prompt rows."""
    max_response_length: PositiveInt
    """Longest response, in tokens, the end-of-sequence token included: the T of every batch."""
    first_room: NonNegativeInt = 0
    """Response tokens that programs have room for at the start; the room grows with the responses,
    up to `max_response_length`. No token changes by it. 0: all room at once."""
    max_num_seqs: NonNegativeInt = 0
    """Rows that a replica decodes at a time; the others wait, and take the place in the batch and
    in the KV cache of those that end; 0: all rows at once."""
    kv_cache_tokens: NonNegativeInt = 0
    """Positions of a replica's KV cache, in pages that rows take as they grow; a row waits until
    there are some, and begins anew if it has to make way. At least one row's maximum; 0: the
    maximum of every row that is decoded at a time."""
    kv_page_tokens: PositiveInt = 32
    """Positions of a page."""
    unroll_layers: bool = False
    """Whether a decode step runs the layers without a loop, on a second set of weights: faster
    where a loop copies a layer's weights out of the stack in every step, as on a CPU."""
    temperature: PositiveFloat = 1.0
    """Logits are divided by it; > 0 because greedy rollouts do not explore."""
    top_k: NonNegativeInt = 0
    """Sample among the k likeliest tokens; 0: all."""
    top_p: PositiveProbability = 1.0
    """Sample among the likeliest tokens that hold this mass; 1: all."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, each one token of the tokenizer."""
    ignore_eos: bool = False
    """Whether every response goes on to its maximum, as in measurements of speed."""
    length_trace: str = ""
    """Mean response lengths by step, START:END:STEPS or a CSV file with
    step,mean_response_length: responses end where it says and not at an end token, to try a run
    whose responses grow. Empty: none."""
    length_shape: str = "lognormal=0.5"
    """How the lengths of a batch lie around that mean: lognormal=SIGMA, or a file of a
    histogram."""
    source: Literal["live", "recorded"] = "live"
    """live: generate; recorded: replay the files of `recorded_dir`."""
    record: bool = False
    """Whether the rollouts are saved for a later replay."""
    recorded_dir: str = ""
    """Directory of recorded rollouts; must exist for source recorded."""

    @property
    def num_rows(self) -> int:
        """Rows per step."""
        return self.batch_size * self.samples_per_prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupConfig:
    """Supervised training of the actor on the answers, before step 0."""

    num_steps: NonNegativeInt = 0
    """Optimizer updates; 0: no warm-up."""
    batch_size: PositiveInt = 64
    """Rows per update."""
    learning_rate: PositiveFloat = 1e-3
    """Constant learning rate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KLConfig:
    """The penalty for leaving the reference model."""

    coef: NonNegativeFloat = 0.05
    """Weight of the penalty; the first one with an adaptive controller."""
    place: Literal["reward", "loss", "none"] = "reward"
    """Subtracted from the token rewards, added to the actor's loss, or not used."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """k1: -log r; k2: (log r)^2 / 2; k3: r - 1 - log r, with r = reference / actor."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """fixed: `coef` throughout; adaptive: proportional control towards `target`."""
    target: PositiveFloat = 0.1
    """KL that the adaptive controller steers to, in nats per sequence."""
    horizon_samples: PositiveInt = 10000
    """Time constant of the adaptive controller, in samples."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """The policy-gradient algorithm."""

    name: Literal["ppo", "grpo", "rloo", "reinforce_pp", "remax"] = "ppo"
    """ppo: a critic is the baseline; grpo, rloo: the other responses to the prompt are; remax: a
    greedy response is; reinforce_pp: the mean of the batch is."""
    epochs: PositiveInt = 1
    """Passes over the rows of a step."""
    minibatch_size: PositiveInt
    """Rows per optimizer update, a divisor of the rows of a step."""
    gamma: Probability = 1.0
    """Discount per token, 0 to 1."""
    gae_lambda: Probability = 0.95
    """Decay of the advantage estimate, 0 to 1."""
    clip: PositiveFloat = 0.2
    """The probability ratio is clipped to [1 - clip, 1 + clip]."""
    value_clip: NonNegativeFloat = 0.2
    """Values move by at most this much from the rollout's; 0: unclipped."""
    kl: KLConfig = dataclasses.field(default_factory=KLConfig)
    """The penalty for leaving the reference model."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    whiten_advantages: Literal["auto", "on", "off"] = "auto"
    """Whether advantages get mean 0 and variance 1 over the valid tokens of the step; auto: on for
    ppo and reinforce_pp."""
    group_std: bool = True
    """grpo: whether a group's rewards are divided by their standard deviation."""
    aggregation: Literal["token", "sequence"] = "token"
    """Loss: mean over all tokens, or over the rows of their means."""
    old_logprobs: Literal["auto", "rollout", "recompute", "corrected"] = "auto"
    """Log-probs of the behaviour policy: as sampled, recomputed by the training engine, or
    recomputed with an importance correction; auto: rollout for float32 compute, recompute for
    bfloat16."""
    correction_cap: AtLeastOne = 2.0
    """Largest importance weight of the correction, >= 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """One optimizer with its schedule."""

    name: Literal["adamw"] = "adamw"
    """adamw."""
    learning_rate: PositiveFloat = 1e-6
    """Learning rate after the warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate to 0 over the run: constant (none), linear or cosine."""
    warmup_steps: NonNegativeInt = 0
    """Updates over which the learning rate rises from 0."""
    b1: Decay = 0.9
    """Decay of the first moment, 0 <= b1 < 1."""
    b2: Decay = 0.95
    """Decay of the second moment, 0 <= b2 < 1."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are scaled down to this global norm; 0: not at all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a TRAIN model-stage runs a minibatch."""

    microbatch_size: PositiveInt
    """Longest rows (prompt and response at their maximum) per microbatch and data-parallel replica.
    That is a budget of tokens: shorter sequences are packed, several to a row."""
    pipeline_microbatches: NonNegativeInt = 0
    """Microbatches per pipeline flush; 0: all of a minibatch in one flush."""
    remat: Literal["none", "layer"] = "none"
    """layer: recompute the activations of a layer in the backward pass."""
    zero1: bool = False
    """Whether the optimizer state is sharded over the replicas."""
    unroll_layers: NonNegativeInt = 1
    """Layers that follow each other in the compiled program without a loop; more take longer to
    compile. 0: all, on a second set of weights and gradients; on a CPU an update is faster by a
    tenth."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    """How a SCORE model-stage runs."""

    microbatch_size: NonNegativeInt = 0
    """Longest rows per microbatch and replica, as in training; 0: `train.microbatch_size`."""
    token_chunk: PositiveInt = 1024
    """Tokens per chunk of the vocabulary projection."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    every: NonNegativeInt = 0
    """Steps between checkpoints; 0: only at the end and on an interrupt."""
    keep: PositiveInt = 2
    """Checkpoints that stay on disk."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on from the newest checkpoint of the run directory; never: refuse a directory
    that holds a run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on held-out prompts."""

    every: NonNegativeInt = 0
    """Steps between evaluations; 0: none."""
    num_prompts: PositiveInt = 200
    """Prompts per evaluation."""
    temperature: NonNegativeFloat = 1.0
    """Logits are divided by it; 0: greedy."""
    greedy: bool = False
    """Whether the same prompts are also answered with the likeliest tokens."""
    batch_size: NonNegativeInt = 0
    """Prompts generated at once; 0: `rollout.batch_size`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """What a run writes besides its metrics."""

    tensorboard: bool = True
    """Whether the metrics also go to TensorBoard files."""
    samples_per_step: NonNegativeInt = 2
    """Responses per step that are written as text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransitionConfig:
    """How the running job goes from one plan to another."""

    verify: Literal["off", "digest", "full"] = "digest"
    """digest: of every leaf before and after, computed where it is; full: every element, gathered
    on the host."""
    way: Literal["auto", "composed", "direct"] = "auto"
    """auto: for each model-stage the cheaper of Split, Destroy, Extend, Merge and of Reshard."""
    switch: Literal["at_step", "when_ready"] = "at_step"
    """at_step: before the step that `plan_changes` names, which waits for programs that are still
    being compiled; when_ready: at the first step boundary from then on that need not wait."""
    hardware: str = ""
    """What its cost is priced with: a name such as 'h100' or a .json file; empty: the devices that
    the job runs on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """What a run learns of its hardware, for predictions of steps and plans."""

    mode: Literal["auto", "on", "off"] = "auto"
    """Whether efficiencies are learned from measured seconds, and kept in calibration.json; auto:
    on real devices that have a description, or with `file`."""
    file: str = ""
    """calibration.json of another run on the same hardware, to start from; empty: none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlConfig:
    """Whether the run looks for better plans by itself."""

    policy: str = ""
    """When it moves: static, dp_only, any_gain, every_k=STEPS or payback=GAMMA (a move must pay
    back within GAMMA of the steps for which it is expected to be right). Empty: no controller."""
    length_threshold: PositiveFloat = 0.30
    """Relative change of the mean, or of the 95th percentile, of response lengths since the last
    look for a plan that is a reason for another."""
    memory_threshold: PositiveFloat = 0.15
    """The same of the largest measured memory of a device."""
    efficiency_threshold: PositiveFloat = 0.25
    """The same of what an operation class reaches of its peak."""
    doubt: NonNegativeFloat = 1.0
    """How many times what prices of plans are off by, as far as the run has shown, payback asks of
    a gain; 0: any gain is one."""
    park: bool = False
    """Whether plans may have idle model-stages wait in host memory, which must have room."""
    pool_trace: str = ""
    """File of changes of the device pool by step: JSON lines with step, event (lost, joined,
    revoke), devices, deadline_s. Empty: none."""
    pool_file: str = ""
    """File that a scheduler appends changes of the pool to, looked at at each step boundary: JSON
    lines with change (lost, joined, revoke), devices, deadline_s. Empty: none."""
    pool_hook: str = ""
    """HOST:PORT at which process 0 answers HTTP: POST /pool takes the same JSON, GET /pool shows
    the pool and the plan. Empty: none."""
    pool_hook_token_file: str = ""
    """File with the token that requests must bear; empty: that of the environment
    (NEREUS_POOL_TOKEN). There must be one where others than this machine reach the address."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run."""

    num_steps: PositiveInt
    """RL steps."""
    seed: SeedInt = 0
    """Seed of initialization, data order and sampling; 32 bits."""
    emulated_devices: NonNegativeInt = 0
    """N > 0: run on N emulated CPU devices per process; 0: on the real ones."""
    device_memory_gib: NonNegativeFloat = 0.0
    """Memory that the plan must fit in, on every device; 0: what the device has. With it
    `--dry-run` says on emulated devices whether a plan fits GPUs that are not there."""
    compilation_cache_dir: str = ""
    """Directory of the persistent compilation cache; empty: none."""
    model: ModelConfig
    tokenizer: TokenizerConfig
    data: DataConfig
    reward: RewardConfig
    rollout: RolloutConfig
    warmup: WarmupConfig
    algorithm: AlgorithmConfig
    actor_optimizer: OptimizerConfig
    critic_optimizer: OptimizerConfig
    train: TrainConfig
    score: ScoreConfig
    plan: Mapping[str, PlanEntry] = dataclasses.field(default_factory=dict, hash=False)
    """Model-stage -> layout, as given; `resolve_plan` adds the model-stages that fall back."""
    plan_file: str = ""
    """A plan of `nereus plan --out`, or a run's plan.json, in the place of `plan`: every
    model-stage's devices, microbatches, remat and zero1, and rollout.max_num_seqs."""
    plan_changes: Mapping[int, Mapping[str, PlanEntry] | str] = dataclasses.field(
        default_factory=dict, hash=False
    )
    """Step -> entries that replace those of the plan before that step, or a plan file."""
    transition: TransitionConfig
    calibration: CalibrationConfig
    control: ControlConfig
    checkpoint: CheckpointConfig
    eval: EvalConfig
    report: ReportConfig

    @property
    def device_memory_bytes(self) -> int:
        """`device_memory_gib` in bytes; 0: what the device has."""
        return int(self.device_memory_gib * 2**30)
