"""A run as its page tells it, whoever wrote it: a job that trained, or the simulator.

Steps count from 0, as in the files.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from nereus_jax.report.page.rows import Row, mapping, text, values, whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagePlan:
    """How a model-stage runs.

    Attributes:
      dp, pp, tp: degrees.
      devices: in words.
      how: everything else, in words.
    """

    dp: int
    pp: int
    tp: int
    devices: str
    how: str = ""

    @property
    def layout(self) -> str:
        """The degrees in words."""
        return f"dp={self.dp}, pp={self.pp}, tp={self.tp}"

    @property
    def count(self) -> int:
        """Devices."""
        return self.dp * self.pp * self.tp


PlanShown = Mapping[str, StagePlan]


def read_plan(row: Row) -> PlanShown:
    """A plan as plan.json or a decision has it; entries that are none are left out."""
    plan: dict[str, StagePlan] = {}
    for stage in sorted(str(key) for key in row):
        entry = mapping(row, stage)
        degrees = [whole(entry, key) for key in ("dp", "pp", "tp")]
        if any(n is None or n < 1 for n in degrees):
            continue
        dp, pp, tp = (n or 1 for n in degrees)
        plan[stage] = StagePlan(dp=dp, pp=pp, tp=tp, devices=_devices(entry), how=_how(entry))
    return plan


def _devices(entry: Row) -> str:
    """Devices in words: runs of a host's neighbours drawn together."""
    named = values(entry, "devices")
    if not named:
        return text(entry, "devices").replace(",", ", ")
    parts: list[str] = []
    run: list[tuple[str, int]] = []
    for name in [*(str(device) for device in named), ""]:
        host, _, index = name.partition(":")
        place = (host, int(index)) if index.isdecimal() else (name, -1)
        if run and place[1] >= 0 and place == (run[-1][0], run[-1][1] + 1):
            run.append(place)
            continue
        if run:
            first = run[0][0] if run[0][1] < 0 else f"{run[0][0]}:{run[0][1]}"
            parts.append(first if len(run) == 1 else f"{first}-{run[-1][1]}")
        run = [place]
    return ", ".join(parts)


def _how(entry: Row) -> str:
    size, flushes = whole(entry, "microbatch_size"), whole(entry, "microbatches")
    parts = [f"microbatches of {size}"] if size else []
    parts += [f"flushes of {flushes}"] if flushes and (whole(entry, "pp") or 1) > 1 else []
    names = {"remat": "recomputed", "zero1": "ZeRO-1", "parked": "parked when idle"}
    parts += [name for key, name in names.items() if entry.get(key) is True]
    return ", ".join(parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPoint:
    """A step; None: the run's files do not say.

    Attributes:
      step: its number.
      step_s: what it took.
      settled: whether no program ran for the first time in it, so that no compilation is in its
        seconds.
      stage_s: of each model-stage.
      edge_s: of all weight edges.
      stage_s_predicted: of each model-stage, by the cost model.
      length_mean, length_p95, length_longest: of its responses, in tokens.
      peak_bytes: of the fullest device.
      devices: of the pool.
      tokens: prompts and responses.
      reward, success, kl: means of its samples.
      out_of_memory: attempts that did not fit, before the one that did.
    """

    step: int
    step_s: float | None = None
    settled: bool = True
    stage_s: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    edge_s: float = 0.0
    stage_s_predicted: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    length_mean: float | None = None
    length_p95: float | None = None
    length_longest: float | None = None
    peak_bytes: float | None = None
    devices: int | None = None
    tokens: float | None = None
    reward: float | None = None
    success: float | None = None
    kl: float | None = None
    out_of_memory: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out prompts after a number of steps."""

    step: int
    success: float | None
    greedy: float | None
    reward: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanFrom:
    """The plan that holds from a step on, to the next one.

    Attributes:
      step: the first step under it.
      plan: by model-stage.
      seconds: that the change to it took; None: there was none, or it was not measured.
      compile_s: of these, waiting for a compiler.
      wire_bytes: moved between devices.
      ways: how, in words.
    """

    step: int
    plan: PlanShown
    seconds: float | None = None
    compile_s: float | None = None
    wire_bytes: float | None = None
    ways: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run.

    Attributes:
      name: of its directory, or its policy and seed.
      simulated: no figure of it was measured.
      where: on which devices.
      policy: of its controller; empty: there was none.
      steps: those that counted, in order.
      evaluations: in order.
      plans: in order; the first one holds from the start.
      decisions: the lines of decisions.jsonl.
      transitions: changes of plan where they were counted: two between the same steps are two.
      budget_bytes: of a device, where the configuration says so.
      planned_steps: of the whole run.
      samples: that were trained on.
      compile_s: waited for compilers in all.
      spent_s: all of the run's time by what it did; empty: not recorded.
      calibration_mape: mean relative error of the cost model at the end.
      failure: why it ended before its last step.
      out_of_memory: whether that was want of memory.
      notes: what of its files could not be used.
    """

    name: str
    simulated: bool
    where: str
    policy: str = ""
    steps: Sequence[StepPoint] = ()
    evaluations: Sequence[Evaluation] = ()
    plans: Sequence[PlanFrom] = ()
    decisions: Sequence[Row] = ()
    transitions: int | None = None
    budget_bytes: float | None = None
    planned_steps: int | None = None
    samples: int | None = None
    compile_s: float | None = None
    spent_s: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    calibration_mape: float | None = None
    failure: str = ""
    out_of_memory: bool = False
    notes: Sequence[str] = ()

    @property
    def changes(self) -> Sequence[PlanFrom]:
        """The plans that another one came before."""
        return self.plans[1:]

    @property
    def last_step(self) -> int:
        """The number of the last step; -1: there is none."""
        return self.steps[-1].step if self.steps else -1
