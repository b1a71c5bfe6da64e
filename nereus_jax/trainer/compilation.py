"""Compiling everything that a run will execute before it starts."""

from nereus_jax.core.roles import REWARD_SCORE
from nereus_jax.core.workflow import ALGORITHMS
from nereus_jax.runtime.engines.score import ScoreEngine
from nereus_jax.runtime.engines.train import TrainEngine
from nereus_jax.trainer.evaluation import evaluation_rows
from nereus_jax.trainer.job import GREEDY, Job, make_warmup_engine


def compile_programs(job: Job, *, warmup: bool) -> None:
    """Compiles the programs of every model-stage and weight edge, in one order on every process.

    Args:
      job: the run.
      warmup: also what the supervised warm-up needs.
    """
    config = job.config
    rows, length, prompt_width = (
        config.rollout.num_rows,
        job.row_length,
        config.data.max_prompt_length,
    )
    if warmup and config.warmup.num_steps:
        _compile_first(make_warmup_engine(job), config.warmup.batch_size, length)
    if config.rollout.source == "live":
        job.generate.program(rows, prompt_width, job.sampling())
    if ALGORITHMS[config.algorithm.name].greedy_baseline:
        prompts = config.rollout.batch_size
        job.generate.program(prompts, prompt_width, job.sampling(GREEDY))
        if REWARD_SCORE in job.scores:
            _compile_first(job.scores[REWARD_SCORE], prompts, length)
    if config.eval.every:
        sampling = job.sampling(config.eval.temperature)
        job.generate.program(evaluation_rows(job), prompt_width, sampling)
        if REWARD_SCORE in job.scores:
            _compile_first(job.scores[REWARD_SCORE], evaluation_rows(job), length)
    for stage in sorted(job.scores):
        _compile_first(job.scores[stage], rows, length)
    for stage in sorted(job.trains):
        _compile_first(job.trains[stage], config.algorithm.minibatch_size, length)
    for target in sorted(job.edges):
        job.edges[target].compile()


def _compile_first(engine: ScoreEngine | TrainEngine, num_rows: int, length: int) -> None:
    """The program of narrow rows; that of wide ones waits for lengths that ask for it."""
    engine.program(engine.shapes(num_rows, length)[0])
