"""Proof by the compiler: the memory of a plan's programs as XLA counts it, nothing allocated.

A candidate's program is built by its engine from abstract shapes and compiled, for this machine's
devices or for GPUs that are not there (`compile_only_devices`).
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from nereus_jax.config import OptimizerConfig
from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.errors import ConfigError
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement
from nereus_jax.core.roles import ModelStage, Role, Stage
from nereus_jax.models.sampling import SamplingConfig
from nereus_jax.planning.hardware import CPU_EMULATED
from nereus_jax.planning.memory_terms import EngineOptions
from nereus_jax.planning.search_plans import PlannedStep
from nereus_jax.planning.search_problem import PlanProblem
from nereus_jax.planning.workload import Workload
from nereus_jax.rl.objectives import PolicyObjective, ValueObjective
from nereus_jax.runtime import emu
from nereus_jax.runtime.compile_only import compile_only_devices
from nereus_jax.runtime.engines.generate import GenerateEngine
from nereus_jax.runtime.engines.score import ScoreEngine, ScoreKind
from nereus_jax.runtime.engines.train import TrainEngine
from nereus_jax.runtime.optimizers import make_optimizer
from nereus_jax.runtime.programs import Program, ProgramCache
from nereus_jax.runtime.world import DeviceHandle, World, form_world

OPTIMIZER = OptimizerConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramChoice:
    """What a program is compiled for.

    Attributes:
      model: sizes.
      model_stage: which.
      workload: of a step.
      layout: of the model-stage.
      microbatch_size: rows; GENERATE: slots.
      microbatches: of a pipeline flush.
      remat, zero1: as in `planning.candidates`.
      param_dtype, compute_dtype: as in the configuration.
      options: of the engines.
      wide: the program of wide rows, where there is one.
    """

    model: DecoderConfig
    model_stage: ModelStage
    workload: Workload
    layout: ParallelLayout
    microbatch_size: int
    microbatches: int = 1
    remat: bool = False
    zero1: bool = False
    param_dtype: str = "float32"
    compute_dtype: str = "bfloat16"
    options: EngineOptions = dataclasses.field(default_factory=EngineOptions)
    wide: bool = False

    @property
    def head(self) -> Head:
        """What the model ends in."""
        scalar = self.model_stage.role in (Role.CRITIC, Role.REWARD)
        return Head.SCALAR if scalar else Head.LM


def compile_program(choice: ProgramChoice, devices: Sequence[DeviceHandle]) -> Program:
    """The compiled program with its sizes; the first devices are used.

    Args:
      choice: what for.
      devices: at least as many as the layout takes.
    """
    world = _world(devices[: choice.layout.num_devices])
    placement = Placement(layout=choice.layout, devices=world.pool.devices)
    site = emu.make_site(world, choice.model_stage, placement, choice.model.num_kv_heads)
    stage = choice.model_stage.stage
    if stage is Stage.GENERATE:
        return _generate(choice, site)
    if stage is Stage.SCORE:
        engine: ScoreEngine | TrainEngine = _score_engine(choice, site)
        rows = choice.workload.rows
    else:
        engine = _train_engine(choice, site)
        rows = min(choice.workload.minibatch_size, choice.workload.rows)
    forms = engine.forms(rows, choice.workload.row_tokens)
    wide = next((f for f in forms if f[0].width > f[0].span), forms[0])
    return engine.program(wide if choice.wide else forms[0])


def _world(devices: Sequence[DeviceHandle]) -> World:
    ids = tuple(DeviceId(0, i) for i in range(len(devices)))
    return World(
        pool=DevicePool(devices=ids),
        handles=dict(zip(ids, devices, strict=True)),
        process_index=0,
        num_processes=1,
    )


def _train_engine(choice: ProgramChoice, site: emu.Site) -> TrainEngine:
    scalar = choice.head is Head.SCALAR
    return TrainEngine(
        config=choice.model,
        head=choice.head,
        site=site,
        param_dtype=choice.param_dtype,
        compute_dtype=choice.compute_dtype,
        precision="default",
        microbatch_size=choice.microbatch_size,
        flush_microbatches=choice.microbatches,
        remat=choice.remat,
        zero1=choice.zero1,
        unroll=0 if choice.options.unrolled_train else 1,
        temperature=1.0,
        token_chunk=choice.options.token_chunk,
        objective=ValueObjective(value_clip=0.2)
        if scalar
        else PolicyObjective(clip=0.2, entropy_coef=0.0),
        optimizer=make_optimizer(OPTIMIZER, 1),
        optimizer_key=OPTIMIZER,
        programs=ProgramCache(),
    )


def _score_engine(choice: ProgramChoice, site: emu.Site) -> ScoreEngine:
    kinds = {Role.CRITIC: ScoreKind.VALUES, Role.REWARD: ScoreKind.REWARDS}
    return ScoreEngine(
        config=choice.model,
        kind=kinds.get(choice.model_stage.role, ScoreKind.LOGPROBS),
        site=site,
        dtype=choice.compute_dtype,
        precision="default",
        microbatch_size=choice.microbatch_size,
        temperature=1.0,
        token_chunk=choice.options.token_chunk,
        programs=ProgramCache(),
    )


def _generate(choice: ProgramChoice, site: emu.Site) -> Program:
    engine = GenerateEngine(
        config=choice.model,
        site=site,
        dtype=choice.compute_dtype,
        prefill_rows=choice.options.prefill_rows,
        precision="default",
        max_num_seqs=choice.microbatch_size,
        kv_cache_tokens=choice.options.kv_cache_tokens,
        kv_page_tokens=choice.options.kv_page_tokens,
        unroll=choice.options.unrolled_generate,
        programs=ProgramCache(),
    )
    workload = choice.workload
    sampling = SamplingConfig(
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        stop_ids=(0,),
        pad_id=0,
        max_tokens=workload.max_response_tokens,
    )
    return engine.program(workload.rows, workload.prompt_lengths.max, sampling)


def verify_step(problem: PlanProblem, step: PlannedStep) -> list[dict[str, Any]]:
    """Compiles every program of a plan; those that are the same once.

    Returns:
      For each model-stage: model_stage, modelled_bytes and compiled_bytes (arguments, results and
      temporaries on a device), compile_s.

    Raises:
      ConfigError: there is no compiler for the hardware.
    """
    devices = _devices(problem, step)
    rows: list[dict[str, Any]] = []
    done: dict[ProgramChoice, tuple[int, float]] = {}
    for stage in step.stages:
        choice = ProgramChoice(
            model=problem.models[stage.model_stage.role],
            model_stage=stage.model_stage,
            workload=problem.workload,
            layout=stage.layout,
            microbatch_size=stage.microbatch_size,
            microbatches=stage.microbatches,
            remat=stage.remat,
            zero1=stage.zero1,
            param_dtype=problem.param_dtype,
            compute_dtype=problem.compute_dtype,
            options=problem.memory.options,
        )
        if choice not in done:
            start_s = time.perf_counter()
            program = compile_program(choice, devices)
            results = max(program.output_bytes - program.alias_bytes, 0)
            total = program.argument_bytes + results + program.temp_bytes
            done[choice] = total, time.perf_counter() - start_s
        total, compile_s = done[choice]
        modelled = sum(stage.memory.values())
        rows.append(
            {
                "model_stage": str(stage.model_stage),
                "modelled_bytes": modelled,
                "compiled_bytes": total,
                "compile_s": compile_s,
            }
        )
    return rows


def _devices(problem: PlanProblem, step: PlannedStep) -> Sequence[DeviceHandle]:
    needed = max(stage.layout.num_devices for stage in step.stages)
    if problem.hardware.name == CPU_EMULATED:
        return list(form_world(emulated_devices=needed).handles.values())
    if not problem.hardware.name.startswith("h100"):
        raise ConfigError(
            f"--verify=compile knows the compiler's description of h100 only, got "
            f"{problem.hardware.name}; leave --verify out"
        )
    return compile_only_devices(needed)
