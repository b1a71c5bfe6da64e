"""Compiling everything that a run will execute before it starts."""

from nereus_jax.core.roles import REWARD_SCORE
from nereus_jax.core.workflow import ALGORITHMS
from nereus_jax.trainer.evaluation import evaluation_rows
from nereus_jax.trainer.job import GREEDY, Job, make_warmup_engine


def compile_programs(job: Job, *, warmup: bool) -> None:
    """Compiles the programs of every model-stage and weight edge, in one order on every process.

    Args:
      job: the run.
      warmup: also what the supervised warm-up needs.
    """
    config = job.config
    rows, width = config.rollout.num_rows, config.rollout.max_response_length
    length, prompt_width = job.row_length, config.data.max_prompt_length
    if warmup and config.warmup.num_steps:
        make_warmup_engine(job).program(config.warmup.batch_size, length, width)
    if config.rollout.source == "live":
        job.generate.program(rows, prompt_width, job.sampling())
    if ALGORITHMS[config.algorithm.name].greedy_baseline:
        prompts = config.rollout.batch_size
        job.generate.program(prompts, prompt_width, job.sampling(GREEDY))
        if REWARD_SCORE in job.scores:
            job.scores[REWARD_SCORE].program(prompts, length, width)
    if config.eval.every:
        sampling = job.sampling(config.eval.temperature)
        job.generate.program(evaluation_rows(job), prompt_width, sampling)
        if REWARD_SCORE in job.scores:
            job.scores[REWARD_SCORE].program(evaluation_rows(job), length, width)
    for stage in sorted(job.scores):
        job.scores[stage].program(rows, length, width)
    for stage in sorted(job.trains):
        job.trains[stage].program(config.algorithm.minibatch_size, length, width)
    for target in sorted(job.edges):
        job.edges[target].compile()
