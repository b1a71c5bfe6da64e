"""One step of an algorithm: its workflow's calls, as work for engines and for the host.

Shapes: B rows, P prompt, T response, S = P + T.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nereus_jax.core.roles import ACTOR_GENERATE, ModelStage, Stage
from nereus_jax.core.timeline import Span
from nereus_jax.core.workflow import Call, HostCall, StageCall
from nereus_jax.rl.losses import token_weights
from nereus_jax.rl.rollout import Rollout
from nereus_jax.runtime import host
from nereus_jax.runtime.dispatch import Arrays, Finished, Work, run_wave
from nereus_jax.runtime.faults import check_devices, watch
from nereus_jax.trainer.job import GREEDY, Job
from nereus_jax.trainer.parked import bring, is_parked, put_away
from nereus_jax.trainer.rollouts import (
    PromptBatch,
    assemble,
    decode_responses,
    draw_seed,
    function_rewards,
    replay,
    traced_lengths,
)
from nereus_jax.trainer.room import outgrows, with_more_room
from nereus_jax.trainer.state import JobState, drop_edges, missing_devices, stage_params
from nereus_jax.trainer.train_batch import TrainBatch, make_batch

Values = dict[str, Any]
"""The named values of a step: what the workflow's calls read and write."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step made.

    Attributes:
      job: the run; its room for responses may have grown.
      values: the workflow's values by name.
      spans: when each model-stage ran.
      parking: when parked state came to devices, and went.
    """

    job: Job
    values: Values
    spans: tuple[Span, ...]
    parking: tuple[Span, ...] = ()


def run_step(job: Job, state: JobState, prompts: PromptBatch) -> StepResult:
    """Runs the workflow once; what is trained in `state` is updated.

    Calls of one wave run together where their devices are disjoint.
    """
    values: Values = {"prompts": prompts}
    spans: list[Span] = []
    parking: list[Span] = []
    state.at_work.clear()  # of a step that was broken off
    for wave in job.workflow.waves():
        made = _run_wave(job, state, values, wave, spans, parking)
        while any(isinstance(x, Rollout) and outgrows(job, x) for x in made.values()):
            job = with_more_room(job)
            made = _run_wave(job, state, values, wave, spans, parking)
        rollouts = [x for x in made.values() if isinstance(x, Rollout)]
        job = job.with_room(max([r.response_width for r in rollouts], default=job.room))
        values |= made
    return StepResult(job=job, values=values, spans=tuple(spans), parking=tuple(parking))


def _run_wave(
    job: Job,
    state: JobState,
    values: Values,
    wave: tuple[Call, ...],
    spans: list[Span],
    parking: list[Span],
) -> Values:
    """What the calls of a wave make, by name; when its model-stages ran, and when parked state came
    and went, is added to the spans."""
    check_devices(job.world, state.arrays(), state.views)
    stage_calls = [c for c in wave if isinstance(c, StageCall)]
    host_calls = [c for c in wave if isinstance(c, HostCall)]
    made = _replay_instead(job, state, values, stage_calls)
    works = {
        call: _work(job, state, values, call) for call in stage_calls if call.outputs[0] not in made
    }
    for call in works:
        if call.model_stage.stage is Stage.TRAIN:
            drop_edges(job, state, call.model_stage)
    meanwhile = functools.partial(_run_host_calls, job, state, host_calls, values, made)
    with watch(job.world, functools.partial(missing_devices, job, state)):
        finished = run_wave(tuple(works.values()), state.counters.step, meanwhile)
        for call in works:
            result = finished.pop(call.name)  # its arrays give their memory to the next wave
            made[call.outputs[0]] = _collect(job, state, values, call, result)
            spans.append(result.span)
            parking += result.parking
    return made


def _run_host_calls(
    job: Job, state: JobState, calls: list[HostCall], values: Values, made: Values
) -> None:
    for call in calls:
        made[call.outputs[0]] = HOST_CALLS[call.function](job, state, values, call)


def _replay_instead(job: Job, state: JobState, values: Values, calls: list[StageCall]) -> Values:
    """The outputs of calls that a recording takes the place of."""
    made: Values = {}
    for call in calls:
        if job.config.rollout.source == "recorded" and call.model_stage == ACTOR_GENERATE:
            with host.together():
                made[call.outputs[0]] = replay(job, values["prompts"], state.counters.step)
    return made


def _work(job: Job, state: JobState, values: Values, call: StageCall) -> Work:
    """The launches of a model-stage in this step."""
    stage = call.model_stage
    devices = tuple(str(d) for d in job.plan[stage].devices)
    if stage.stage is Stage.GENERATE:
        launches = (lambda: _launch_generate(job, state, values, call),)
    elif stage.stage is Stage.SCORE:
        launches = (lambda: _launch_score(job, state, values, call),)
    else:
        launches = _train_launches(job, state, values["batch"], stage)
    if not is_parked(job, stage):
        return Work(name=call.name, devices=devices, launches=launches)
    return Work(
        name=call.name,
        devices=devices,
        launches=launches,
        bring=functools.partial(bring, job, state, stage),
        put_away=functools.partial(put_away, job, state, stage),
    )


def _prompts(job: Job, values: Values, call: StageCall) -> PromptBatch:
    """The rows that a GENERATE call answers: a greedy response is the same for all of a prompt."""
    prompts: PromptBatch = values["prompts"]
    return prompts.every(job.config.rollout.samples_per_prompt) if call.purpose else prompts


def _launch_generate(job: Job, state: JobState, values: Values, call: StageCall) -> Arrays:
    prompts = _prompts(job, values, call)
    lengths_B = traced_lengths(job, prompts, state.counters)
    return job.generate.dispatch(
        stage_params(job, state, ACTOR_GENERATE),
        prompts.tokens_BP,
        prompts.lengths_B,
        prompts.sample_indices_B,
        draw_seed(job.config.seed, "rollout"),
        job.sampling(GREEDY if call.purpose else None),
        None if lengths_B is None else np.minimum(lengths_B, job.room),
    )


def _launch_score(job: Job, state: JobState, values: Values, call: StageCall) -> Arrays:
    rollout: Rollout = values[call.inputs[0]]
    return job.scores[call.model_stage].dispatch(
        stage_params(job, state, call.model_stage),
        rollout.tokens_BS,
        rollout.prompt_lengths_B,
        rollout.lengths_B,
    )


def _train_launches(
    job: Job, state: JobState, batch: TrainBatch, stage: ModelStage
) -> tuple[Callable[[], Arrays], ...]:
    engine = job.trains[stage]

    def launch(rows: np.ndarray) -> Arrays:
        state.updating = True
        arrays = {name: x[rows] for name, x in batch.arrays.items()}
        arrays["weights"] = token_weights(
            batch.rollout.mask_BT[rows], job.config.algorithm.aggregation
        )
        state.trained[stage], metrics = engine.dispatch(
            state.trained[stage],
            batch.rollout.tokens_BS[rows],
            batch.rollout.prompt_lengths_B[rows],
            batch.rollout.lengths_B[rows],
            arrays,
            {"kl_coef": batch.kl_coef},
        )
        return metrics

    return tuple(functools.partial(launch, rows) for rows in batch.minibatches)


def _collect(job: Job, state: JobState, values: Values, call: StageCall, finished: Finished) -> Any:
    """Brings a model-stage's results to the host."""
    stage = call.model_stage
    if stage.stage is Stage.TRAIN:
        return [host.fetch(arrays) for arrays in finished.arrays]
    arrays = host.fetch(finished.arrays[0])
    if stage.stage is Stage.GENERATE:
        prompts = _prompts(job, values, call)
        lengths_B = traced_lengths(job, prompts, state.counters)
        if lengths_B is not None:
            arrays = {**arrays, "finished": lengths_B <= job.room}
        return assemble(
            prompts.tokens_BP,
            prompts.lengths_B,
            prompts.sample_indices_B,
            arrays,
            job.inputs.tokenizer.pad_id,
            state.counters.policy_version,
        )
    rollout: Rollout = values[call.inputs[0]]
    scores = job.scores[stage].unpack(
        arrays,
        rollout.tokens_BS.shape[1],
        rollout.prompt_lengths_B,
        rollout.lengths_B,
        rollout.response_width,
    )
    return next(iter(scores.values())) if len(scores) == 1 else scores


def _rewards(job: Job, state: JobState, values: Values, call: HostCall) -> np.ndarray:
    rollout: Rollout = values[call.inputs[-1]]
    prompts: PromptBatch = values["prompts"]
    if rollout.num_rows < len(prompts.samples):  # one response to each prompt
        prompts = prompts.every(job.config.rollout.samples_per_prompt)
    return function_rewards(job, prompts.samples, decode_responses(job, rollout))


def _advantages(job: Job, state: JobState, values: Values, call: HostCall) -> TrainBatch:
    return make_batch(job, state.counters, values)


HOST_CALLS: Mapping[str, Callable[[Job, JobState, Values, HostCall], Any]] = {
    "rewards": _rewards,
    "advantages": _advantages,
}
