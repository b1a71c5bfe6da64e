"""Compiling everything that a run will execute before it starts, and what a plan needs before the
run changes to it."""

from nereus_jax.core.roles import REWARD_SCORE
from nereus_jax.core.workflow import ALGORITHMS
from nereus_jax.runtime.compile_queue import CompileQueue
from nereus_jax.runtime.digests import digest_recipe
from nereus_jax.runtime.engines.score import ScoreEngine
from nereus_jax.runtime.engines.train import TrainEngine
from nereus_jax.runtime.programs import Recipe
from nereus_jax.trainer.job import GREEDY, Job, make_warmup_engine
from nereus_jax.trainer.verification import state_stages, unit_spec


def compile_programs(job: Job, *, warmup: bool) -> None:
    """Compiles the programs of every model-stage and weight edge, in one order on every process.

    Args:
      job: the run.
      warmup: also what the supervised warm-up needs.
    """
    config = job.config
    if warmup and config.warmup.num_steps:
        rows = config.warmup.batch_size
        whole = job.with_room(config.rollout.max_response_length)  # answers are not generated
        job.programs.get(*_first_recipe(make_warmup_engine(job), rows, whole.row_length))
    for recipe in step_recipes(job):
        job.programs.get(*recipe)
    for target in sorted(job.edges):
        job.edges[target].compile()


def compile_ahead(old: Job, job: Job, queue: CompileQueue) -> None:
    """Compiles what a change of plan and the steps after it need, in the background."""
    for recipe in (*digest_recipes(old), *digest_recipes(job), *step_recipes(job)):
        job.programs.prefetch(*recipe, queue)
    for target in sorted(job.edges):
        job.edges[target].compile_in(queue)


def step_recipes(job: Job) -> list[Recipe]:
    """The programs of steps and evaluations."""
    config = job.config
    rows, length = config.rollout.num_rows, job.row_length
    width, evaluated = config.data.max_prompt_length, job.evaluation_rows
    reward = job.scores.get(REWARD_SCORE)
    recipes: list[Recipe] = []
    if config.rollout.source == "live":
        recipes.append(job.generate.recipe(rows, width, job.sampling()))
    if ALGORITHMS[config.algorithm.name].greedy_baseline:
        prompts = config.rollout.batch_size
        recipes.append(job.generate.recipe(prompts, width, job.sampling(GREEDY)))
        recipes += [_first_recipe(reward, prompts, length)] if reward else []
    if config.eval.every:
        temperatures = (config.eval.temperature, *((GREEDY,) if config.eval.greedy else ()))
        recipes += [job.generate.recipe(evaluated, width, job.sampling(t)) for t in temperatures]
        recipes += [_first_recipe(reward, evaluated, length)] if reward else []
    recipes += [_first_recipe(job.scores[stage], rows, length) for stage in sorted(job.scores)]
    minibatch = config.algorithm.minibatch_size
    recipes += [_first_recipe(job.trains[s], minibatch, length) for s in sorted(job.trains)]
    return recipes


def digest_recipes(job: Job) -> list[Recipe]:
    """The programs that verify a change of plan."""
    if job.config.transition.verify == "off":
        return []
    specs = {stage: unit_spec(job, stage) for stage in state_stages(job)}
    return [
        digest_recipe(job.sites[stage], leaf, spec.rules)
        for stage, spec in specs.items()
        for leaf in spec
    ]


def _first_recipe(engine: ScoreEngine | TrainEngine, num_rows: int, length: int) -> Recipe:
    """The program of the usual rows; those of other forms wait for lengths that ask for them."""
    return engine.recipe(engine.forms(num_rows, length)[0])
