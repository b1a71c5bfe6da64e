"""The plans of a run: from entries of its configuration, or from plan files, to placements and how
every model-stage runs on them. All is checked before anything is allocated."""

import dataclasses
from collections.abc import Mapping

from nereus_jax.config import (
    PlanEntry,
    RunConfig,
    check_plan_against_devices,
    check_plan_against_model,
    plan_keys,
    plans_by_step,
    read_plan_file,
    resolve_plan,
)
from nereus_jax.core.architectures import DecoderConfig
from nereus_jax.core.devices import DevicePool
from nereus_jax.core.errors import ConfigError, InfeasiblePlanError
from nereus_jax.core.execution_plan import ExecutionPlan, StageChoice
from nereus_jax.core.layout import ParallelLayout, divisors
from nereus_jax.core.packed_cuts import SCORE_FLUSH_PER_RANK
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.roles import REWARD_SCORE, ModelStage, Stage
from nereus_jax.planning.run_problem import make_workflow, most_prefill_rows


def configured_choice(config: RunConfig, stage: ModelStage, layout: ParallelLayout) -> StageChoice:
    """How a model-stage runs that no plan file speaks of: `train.*`, `score.*`, `rollout.*`.

    Rows that are decoded at a time are as many as the engine makes of them: equal groups for the
    ranks of the pipeline, each a whole number of prefill microbatches.
    """
    train = config.train
    if stage.stage is Stage.GENERATE:
        group = -(-config.rollout.max_num_seqs // layout.pp)
        together = max(min(group, most_prefill_rows(config)), 1)
        return StageChoice(microbatch_size=layout.pp * together * -(-group // together))
    if stage.stage is Stage.SCORE:
        return StageChoice(microbatch_size=config.score.microbatch_size or train.microbatch_size)
    return StageChoice(
        microbatch_size=train.microbatch_size,
        microbatches=train.pipeline_microbatches,
        remat=train.remat == "layer",
        zero1=train.zero1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanMaker:
    """Makes the plans of a run.

    Attributes:
      config: of the run.
      model: sizes of actor, critic and reference.
      reward_model: sizes of the reward model, if there is one.
      pool: the devices.
    """

    config: RunConfig
    model: DecoderConfig
    reward_model: DecoderConfig | None
    pool: DevicePool

    def first(self) -> ExecutionPlan:
        """The plan that the run starts with.

        Raises:
          ConfigError, InfeasiblePlanError: a layout that the devices or the model cannot take.
        """
        keys = plan_keys(self.config)
        if 0 in keys:
            return self._from_file(*keys[0])
        return self._from_entries("plan", resolve_plan(self.config))

    def later(self) -> dict[int, ExecutionPlan]:
        """The plans that it changes to, by the step before which it does.

        Raises:
          ConfigError, InfeasiblePlanError: as in `first`.
        """
        plans = {
            step: self._from_entries(f"plan_changes.{step}", entries)
            for step, entries in plans_by_step(self.config).items()
        }
        for step, (key, path) in plan_keys(self.config).items():
            if step:
                plans[step] = self._from_file(key, path)
        return dict(sorted(plans.items()))

    def _from_entries(self, section: str, entries: Mapping[str, PlanEntry]) -> ExecutionPlan:
        check_plan_against_devices(entries, len(self.pool), section)
        self._check_model(section, entries)
        wanted = set(make_workflow(self.config).model_stages)
        placements = {
            ModelStage.parse(name): Placement(
                layout=ParallelLayout(entry.dp, entry.pp, entry.tp),
                devices=tuple(self.pool.devices[i] for i in entry.positions),
            )
            for name, entry in entries.items()
            if ModelStage.parse(name) in wanted
        }
        choices = {
            s: dataclasses.replace(
                configured_choice(self.config, s, p.layout), parked=entries[str(s)].parked
            )
            for s, p in placements.items()
        }
        return ExecutionPlan(plan=Plan(placements=placements), choices=choices)

    def _from_file(self, key: str, path: str) -> ExecutionPlan:
        given = read_plan_file(key, path)
        where = f"{key} ({path})"
        wanted = make_workflow(self.config).model_stages
        missing = [str(s) for s in wanted if s not in given.plan]
        unknown = [str(s) for s in given.plan.placements if s not in wanted]
        if missing or unknown:
            wrong = f"{', '.join(missing)} is missing" if missing else ""
            wrong = wrong or f"{', '.join(unknown)} is no part of this run"
            raise ConfigError(
                f"{where}: {wrong}; the run has {', '.join(str(s) for s in sorted(wanted))}: plan "
                f"with the same algorithm, reward model and dtype"
            )
        try:
            given.plan.check_pool(self.pool)
        except InfeasiblePlanError as error:
            raise InfeasiblePlanError(f"{where}: {error}") from None
        layouts = {str(s): p.layout for s, p in given.plan.placements.items()}
        entries = {name: PlanEntry(dp=x.dp, pp=x.pp, tp=x.tp) for name, x in layouts.items()}
        self._check_model(where, entries)
        for stage, choice in given.choices.items():
            _check_choice(f"{where}: {stage}", self.config, stage, given.plan[stage].layout, choice)
        return given

    def _check_model(self, section: str, entries: Mapping[str, PlanEntry]) -> None:
        reward = {name: e for name, e in entries.items() if name == str(REWARD_SCORE)}
        own = {name: e for name, e in entries.items() if name not in reward}
        check_plan_against_model(own, self.model.num_heads, self.model.num_layers, section)
        if self.reward_model is not None:
            sizes = self.reward_model
            check_plan_against_model(reward, sizes.num_heads, sizes.num_layers, section)


def rows_of(config: RunConfig, stage: ModelStage) -> int:
    """Rows that a program of a model-stage is for: a minibatch in TRAIN, else a step."""
    train = stage.stage is Stage.TRAIN
    return config.algorithm.minibatch_size if train else config.rollout.num_rows


def _check_choice(
    where: str, config: RunConfig, stage: ModelStage, layout: ParallelLayout, choice: StageChoice
) -> None:
    """Checks that the engines can run a choice exactly as it is written.

    Raises:
      ConfigError: see the message.
    """
    if stage.stage is not Stage.TRAIN and (choice.remat or choice.zero1):
        raise ConfigError(f"{where}: remat and zero1 are for TRAIN; set them to false")
    rows = rows_of(config, stage)
    if layout.dp > rows:
        raise ConfigError(f"{where}: dp={layout.dp} replicas share {rows} rows; use at most {rows}")
    own = -(-rows // layout.dp)
    size = choice.microbatch_size
    if stage.stage is Stage.GENERATE:
        if size % layout.pp:
            raise ConfigError(
                f"{where}: microbatch_size={size} rows at a time do not divide into the equal "
                f"groups of {layout.pp} pipeline ranks; use a multiple of {layout.pp}"
            )
        return
    what = f"the {own} rows of a replica"
    what += " in a minibatch" if stage.stage is Stage.TRAIN else ""
    if own % size:
        allowed = ", ".join(str(n) for n in divisors(own))
        raise ConfigError(
            f"{where}: microbatch_size={size} does not divide {what}; allowed: {allowed}"
        )
    total = own // size
    if layout.pp == 1:
        return
    if stage.stage is Stage.SCORE:
        flush = min(SCORE_FLUSH_PER_RANK * layout.pp, total)
        if choice.microbatches not in (0, flush):
            raise ConfigError(
                f"{where}: microbatches={choice.microbatches}, but a flush of SCORE has {flush} "
                f"here; write 0 or {flush}"
            )
    elif choice.microbatches and total % choice.microbatches:
        allowed = ", ".join(str(n) for n in divisors(total))
        raise ConfigError(
            f"{where}: microbatches={choice.microbatches} of a flush do not divide the {total} "
            f"microbatches of a replica; allowed: 0 (all), {allowed}"
        )


def prefill_rows(config: RunConfig, layout: ParallelLayout, choice: StageChoice) -> int:
    """Prompts of a replica that are in the layers at a time.

    With so many rows at a time as a plan says, a part of a pipeline group of them: the engine would
    fill the group up with rows that the plan has no memory for.
    """
    most = most_prefill_rows(config)
    if not choice.microbatch_size:
        return most
    group = -(-choice.microbatch_size // layout.pp)
    return max(n for n in divisors(group) if n <= most)
