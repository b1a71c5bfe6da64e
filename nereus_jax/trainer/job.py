"""Everything of a run that does not change from step to step, made from its configuration.

Nothing here allocates device memory: a mistake in the configuration, the data, the model's files or
the plan is found before that.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from nereus_jax.config import OptimizerConfig, RunConfig, find_data_files
from nereus_jax.core import workflow
from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.emu_spec import EmuSpec
from nereus_jax.core.errors import ConfigError, DataError
from nereus_jax.core.execution_plan import ExecutionPlan, StageChoice
from nereus_jax.core.plan import Plan
from nereus_jax.core.presets import preset
from nereus_jax.core.roles import (
    ACTOR_GENERATE,
    ACTOR_SCORE,
    ACTOR_TRAIN,
    CRITIC_SCORE,
    CRITIC_TRAIN,
    REFERENCE_SCORE,
    REWARD_SCORE,
    ModelStage,
    Role,
)
from nereus_jax.data.files import open_problems
from nereus_jax.data.prompts import Problems, PromptStream, TaskProblems
from nereus_jax.data.records import RecordSchema
from nereus_jax.data.tokenizers import Tokenizer, make_tokenizer
from nereus_jax.models import huggingface
from nereus_jax.models.sampling import SamplingConfig
from nereus_jax.planning.length_traces import LengthTrace, parse_curve, parse_shape
from nereus_jax.planning.run_problem import (
    check_fits,
    make_workflow,
    old_logprobs_mode,
    random_model,
)
from nereus_jax.rl.objectives import (
    Objective,
    PolicyObjective,
    SupervisedObjective,
    ValueObjective,
)
from nereus_jax.rl.rewards import RewardFunction, load_function
from nereus_jax.runtime.emu import Site, make_site
from nereus_jax.runtime.engines.generate import GenerateEngine
from nereus_jax.runtime.engines.score import ScoreEngine, ScoreKind
from nereus_jax.runtime.engines.train import TrainEngine
from nereus_jax.runtime.optimizers import make_optimizer
from nereus_jax.runtime.programs import ProgramCache
from nereus_jax.runtime.transfers import Transfer
from nereus_jax.runtime.world import World
from nereus_jax.trainer.edges import edge_temp_bytes, make_transfer
from nereus_jax.trainer.plans import PlanMaker, prefill_rows

TASK_PREFIX = "task:"
GREEDY = 0.0
"""The temperature that takes the likeliest token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a run reads: text, models' sizes, rewards. Found and checked without any device."""

    tokenizer: Tokenizer
    train_prompts: PromptStream
    eval_prompts: PromptStream
    reward_function: RewardFunction | None
    model: DecoderConfig
    reward_model: DecoderConfig | None
    stop_ids: tuple[int, ...]
    lengths: LengthTrace | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A run, ready to allocate its models."""

    config: RunConfig
    inputs: Inputs
    world: World
    execution: ExecutionPlan
    workflow: workflow.Workflow
    sites: Mapping[ModelStage, Site]
    programs: ProgramCache
    generate: GenerateEngine
    scores: Mapping[ModelStage, ScoreEngine]
    trains: Mapping[ModelStage, TrainEngine]
    edges: Mapping[ModelStage, Transfer]
    """Target of a weight edge -> the transfer that serves it."""
    room: int
    """T, the response tokens that programs take; at most `rollout.max_response_length`."""

    @property
    def plan(self) -> Plan:
        """Where the model-stages live."""
        return self.execution.plan

    @property
    def peak_memory_bytes(self) -> int:
        """Most bytes at a time on a device in this step: state, and a program or a transfer."""
        ledger = self.programs.ledger
        edges = [edge_temp_bytes(edge) for edge in self.edges.values()]
        return max(ledger.peak_bytes, max(ledger.held.values(), default=0) + max(edges, default=0))

    @property
    def compile_cost(self) -> dict[str, float]:
        """Seconds so far: compilation that was waited for, that was not, and first exchanges."""
        costs = self.programs.costs
        edges = [edge.cost for edge in self.edges.values()]
        exposed_s = sum(c.exposed_s for c in costs) + sum(e.exposed_compile_s for e in edges)
        total_s = sum(c.compile_s for c in costs) + sum(e.compile_s for e in edges)
        return {
            "exposed": exposed_s,
            "hidden": total_s - exposed_s,
            "set_up": sum(e.set_up_s for e in edges),
        }

    def model_spec(self, stage: ModelStage) -> EmuSpec:
        """The leaves that a model-stage holds, in the dtype it computes with."""
        return _model_spec(self.config, self.inputs, stage)

    def decoder(self, stage: ModelStage) -> DecoderConfig:
        """The sizes of a model-stage's model."""
        return _decoder(self.inputs, stage)

    @property
    def row_length(self) -> int:
        """S, the columns of prompt and response together."""
        return self.config.data.max_prompt_length + self.room

    @property
    def evaluation_rows(self) -> int:
        """Rows of an evaluation batch."""
        return self.config.eval.batch_size or self.config.rollout.batch_size

    def with_room(self, room: int) -> "Job":
        """The run with programs for responses of so many tokens; itself if it has them."""
        return self if room == self.room else dataclasses.replace(self, room=room)

    @property
    def num_programs(self) -> dict[str, int]:
        """How many programs of each model-stage are compiled, under this plan or others."""
        return dict(Counter(key.model_stage for key, _ in self.programs.items()))

    def sampling(self, temperature: float | None = None) -> SamplingConfig:
        """How responses are drawn: as in training, or at another temperature."""
        rollout = self.config.rollout
        return SamplingConfig(
            temperature=rollout.temperature if temperature is None else temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            stop_ids=() if rollout.ignore_eos or self.inputs.lengths else self.inputs.stop_ids,
            pad_id=self.inputs.tokenizer.pad_id,
            max_tokens=self.room,
        )


def read_inputs(config: RunConfig) -> Inputs:
    """Reads tokenizer, prompts, reward function and the sizes of the models.

    Raises:
      ConfigError, DataError: something is missing or does not fit together.
    """
    tokenizer = make_tokenizer(config)
    model = _model_config(config, tokenizer)
    reward_model = None
    if config.reward.model_path:
        reward_model = huggingface.TensorSource(config.reward.model_path, Head.SCALAR).config
        check_fits(config, tokenizer.vocab_size, reward_model, "the reward model")
    if config.model.path:
        huggingface.TensorSource(config.model.path, Head.LM)  # every tensor is there, or DataError
    return Inputs(
        tokenizer=tokenizer,
        train_prompts=_make_stream(config, tokenizer, "train"),
        eval_prompts=_make_stream(config, tokenizer, "eval"),
        reward_function=load_function(config.reward.function) if config.reward.function else None,
        model=model,
        reward_model=reward_model,
        stop_ids=_stop_ids(config, tokenizer),
        lengths=_length_trace(config),
    )


def _length_trace(config: RunConfig) -> LengthTrace | None:
    settings = config.rollout
    if not settings.length_trace:
        return None
    return LengthTrace(
        curve=parse_curve(settings.length_trace),
        shape=parse_shape(settings.length_shape),
    )


def _model_config(config: RunConfig, tokenizer: Tokenizer) -> DecoderConfig:
    sizes = config.model
    if sizes.path:
        model = huggingface.read_config(Path(sizes.path).expanduser())
    elif sizes.preset:
        model = preset(sizes.preset)
    else:
        model = random_model(config, tokenizer.vocab_size)
    check_fits(config, tokenizer.vocab_size, model, "the model")
    return model


def _make_stream(config: RunConfig, tokenizer: Tokenizer, split: str) -> PromptStream:
    data = config.data
    source = data.train if split == "train" else data.eval
    problems: Problems
    if source.startswith(TASK_PREFIX):
        problems = TaskProblems(
            source.removeprefix(TASK_PREFIX),
            split=split,
            size=data.train_size if split == "train" else data.eval_size,
            seed=config.seed,
            options=dict(data.task_options),
            distinct=data.distinct,
        )
    else:
        schema = RecordSchema(prompt_field=data.prompt_field, answer_field=data.answer_field)
        problems = open_problems(find_data_files(f"data.{split}", source), schema)
    stream = PromptStream(
        problems,
        tokenizer,
        seed=config.seed,
        max_prompt_length=data.max_prompt_length,
        overlong=data.overlong,
        chat_template=data.chat_template,
        system_prompt=data.system_prompt,
        prompt_suffix=data.prompt_suffix,
    )
    first = stream.take(0, 1).samples[0]  # a template or a tokenizer that fails, fails now
    if split == "train" and config.warmup.num_steps:
        tokenizer.encode(first.answer, add_special_tokens=False)
    return stream


def _stop_ids(config: RunConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    ids = list(tokenizer.eos_ids)
    if config.model.path and config.tokenizer.kind == "huggingface":
        # A tokenizer from elsewhere may not know what the model was taught to end with.
        ids += huggingface.read_eos_ids(Path(config.model.path).expanduser())
    for text in config.rollout.stop:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) != 1:
            raise ConfigError(
                f"rollout.stop entry {text!r} is {len(tokens)} tokens; a stop string must be a "
                f"single token of the tokenizer"
            )
        ids.append(tokens[0])
    if not ids:
        raise DataError("the tokenizer names no end token; set rollout.stop to a token's text")
    return tuple(dict.fromkeys(ids))


def plan_maker(config: RunConfig, inputs: Inputs, world: World) -> PlanMaker:
    """What makes the plans of a run on these devices."""
    return PlanMaker(
        config=config, model=inputs.model, reward_model=inputs.reward_model, pool=world.pool
    )


def make_job(
    config: RunConfig,
    inputs: Inputs,
    world: World,
    execution: ExecutionPlan | None = None,
    programs: ProgramCache | None = None,
) -> Job:
    """Puts a run together on these devices.

    Args:
      config: of the run.
      inputs: of the run.
      world: its devices.
      execution: where the model-stages live, and how they run; None: as the configuration says at
        the start.
      programs: compiled before, under this plan or others; None: none.
    """
    if execution is None:
        execution = plan_maker(config, inputs, world).first()
    if programs is None:
        programs = ProgramCache(config.device_memory_bytes)
    sites = {
        stage: make_site(world, stage, placement, _decoder(inputs, stage).num_kv_heads)
        for stage, placement in execution.plan.placements.items()
    }
    builder = _EngineBuilder(
        config=config,
        inputs=inputs,
        sites=sites,
        choices=execution.choices,
        programs=programs,
    )
    objectives = {
        ACTOR_TRAIN: builder.policy_objective(),
        CRITIC_TRAIN: ValueObjective(value_clip=config.algorithm.value_clip),
    }
    trains = {
        stage: builder.train(stage, objective, num_updates(config))
        for stage, objective in objectives.items()
        if stage in sites
    }
    graph = make_workflow(config)
    return Job(
        config=config,
        inputs=inputs,
        world=world,
        execution=execution,
        workflow=graph,
        sites=sites,
        programs=programs,
        generate=builder.generate(),
        scores={
            stage: builder.score(stage)
            for stage in (ACTOR_SCORE, REFERENCE_SCORE, CRITIC_SCORE, REWARD_SCORE)
            if stage in sites
        },
        trains=trains,
        edges={
            edge.target: make_transfer(
                world,
                trains[edge.source].spec,
                sites[edge.source],
                _model_spec(config, inputs, edge.target),
                sites[edge.target],
            )
            for edge in graph.weight_edges
        },
        room=config.rollout.first_room or config.rollout.max_response_length,
    )


def make_warmup_engine(job: Job) -> TrainEngine:
    """The engine that trains the actor on the answers before step 0."""
    warmup = job.config.warmup
    optimizer = OptimizerConfig(learning_rate=warmup.learning_rate)
    return _EngineBuilder(
        config=job.config,
        inputs=job.inputs,
        sites=job.sites,
        choices=job.execution.choices,
        programs=job.programs,
    ).train(ACTOR_TRAIN, SupervisedObjective(), warmup.num_steps, optimizer)


def num_updates(config: RunConfig) -> int:
    """Optimizer updates of a model over the whole run."""
    minibatches = config.rollout.num_rows // config.algorithm.minibatch_size
    return config.num_steps * config.algorithm.epochs * minibatches


def _model_spec(config: RunConfig, inputs: Inputs, stage: ModelStage) -> EmuSpec:
    scalar = stage.role in (Role.CRITIC, Role.REWARD)
    head = Head.SCALAR if scalar else Head.LM
    return _decoder(inputs, stage).spec(head, config.model.compute_dtype)


def _decoder(inputs: Inputs, stage: ModelStage) -> DecoderConfig:
    if stage.role is Role.REWARD:
        assert inputs.reward_model is not None
        return inputs.reward_model
    return inputs.model


@dataclasses.dataclass(frozen=True, kw_only=True)
class _EngineBuilder:
    config: RunConfig
    inputs: Inputs
    sites: Mapping[ModelStage, Site]
    choices: Mapping[ModelStage, StageChoice]
    programs: ProgramCache

    def generate(self) -> GenerateEngine:
        site, choice = self.sites[ACTOR_GENERATE], self.choices[ACTOR_GENERATE]
        return GenerateEngine(
            config=self.inputs.model,
            site=site,
            dtype=self.config.model.compute_dtype,
            prefill_rows=prefill_rows(self.config, site.placement.layout, choice),
            precision=self.config.model.matmul_precision,
            max_num_seqs=choice.microbatch_size,
            kv_cache_tokens=self.config.rollout.kv_cache_tokens,
            kv_page_tokens=self.config.rollout.kv_page_tokens,
            unroll=self.config.rollout.unroll_layers,
            programs=self.programs,
        )

    def score(self, stage: ModelStage) -> ScoreEngine:
        kinds = {Role.CRITIC: ScoreKind.VALUES, Role.REWARD: ScoreKind.REWARDS}
        config = self.config
        return ScoreEngine(
            config=_decoder(self.inputs, stage),
            kind=kinds.get(stage.role, ScoreKind.LOGPROBS),
            site=self.sites[stage],
            dtype=config.model.compute_dtype,
            precision=config.model.matmul_precision,
            microbatch_size=self.choices[stage].microbatch_size,
            temperature=config.rollout.temperature,
            token_chunk=config.score.token_chunk,
            programs=self.programs,
        )

    def policy_objective(self) -> PolicyObjective:
        algorithm = self.config.algorithm
        return PolicyObjective(
            clip=algorithm.clip,
            entropy_coef=algorithm.entropy_coef,
            kl_estimator=algorithm.kl.estimator if algorithm.kl.place == "loss" else None,
            corrected=old_logprobs_mode(self.config) == "corrected",
        )

    def train(
        self,
        stage: ModelStage,
        objective: Objective,
        updates: int,
        optimizer: OptimizerConfig | None = None,
    ) -> TrainEngine:
        config, choice = self.config, self.choices[stage]
        if optimizer is None:
            actor = stage.role is Role.ACTOR
            optimizer = config.actor_optimizer if actor else config.critic_optimizer
        return TrainEngine(
            config=self.inputs.model,
            head=Head.SCALAR if stage.role is Role.CRITIC else Head.LM,
            site=self.sites[stage],
            param_dtype=config.model.param_dtype,
            compute_dtype=config.model.compute_dtype,
            precision=config.model.matmul_precision,
            microbatch_size=choice.microbatch_size,
            flush_microbatches=choice.microbatches,
            remat=choice.remat,
            zero1=choice.zero1,
            unroll=config.train.unroll_layers,
            temperature=config.rollout.temperature,
            token_chunk=config.score.token_chunk,
            objective=objective,
            optimizer=make_optimizer(optimizer, updates),
            optimizer_key=(optimizer, updates),
            programs=self.programs,
        )
