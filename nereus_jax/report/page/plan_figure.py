"""Which plan held when: a band a model-stage, and the same as a table."""

from collections.abc import Iterable, Sequence

from nereus_jax.report.page.markup import NONE, details, esc, seconds, size, table
from nereus_jax.report.page.plot import Frame, figure, step_axis, svg_start
from nereus_jax.report.page.record import PlanFrom, PlanShown, StagePlan
from nereus_jax.report.page.scene import Scene
from nereus_jax.report.page.stages import in_order, stage_style

ROW = 42
BAND = 20
"""Pixels of a model-stage with its name, and of its band alone."""
MOST_PLANS = 120
"""Plans that are drawn and told; of more, the first ones of equally long parts of the run."""
WIDTHS = {"wide-only": 840.0, "narrow": 330.0}
"""Pixels that a band has at least, on a screen and on a telephone."""
LETTER = 7.2
"""Pixels of a letter, rather too many than too few."""

Run = tuple[int, int, StagePlan]
"""First step, the step behind the last, and how the model-stage runs in between."""


def plan_figure(scene: Scene) -> str:
    """The plans of a run over its steps."""
    if not scene.run.plans:
        return figure(
            f"{scene.key}-plan-f",
            "Plan over time",
            scene.badge,
            "",
            note="The run's files do not tell its plan.",
            wide=True,
        )
    plans = _drawn(scene)
    stages = in_order({stage for p in plans for stage in p.plan})
    frame = scene.frame(1.0, height=ROW * len(stages))
    name = f"{scene.key}-plan"
    desc = "; ".join(_told(plans[0].plan, stages))
    changes = len(scene.run.changes)
    desc = f"{changes} changes of plan. At first: {desc}"
    bands = [_band(frame, i, s, _runs(scene, plans, s)) for i, s in enumerate(stages)]
    drawn = (
        svg_start(name, "Layout of each model-stage over the steps", desc, frame.height + 40)
        + "".join(bands)
        + step_axis(frame)
        + "</svg>"
    )
    note = "dp, pp, tp (in short 4/1/2): degrees of data, pipeline and tensor parallelism."
    if len(plans) < len(scene.run.plans):
        note += f" {len(plans)} of {len(scene.run.plans)} plans are shown."
    return figure(
        f"{scene.key}-plan-f",
        "Plan over time",
        scene.badge,
        f'<div class="bands">{drawn}</div>'
        + details("All plans, in words", _plan_table(plans, stages)),
        note=note,
        wide=True,
    )


def _drawn(scene: Scene) -> Sequence[PlanFrom]:
    plans = scene.run.plans
    if len(plans) <= MOST_PLANS:
        return plans
    first, stop = scene.buckets[0].first, scene.buckets[-1].stop
    parts = {int((p.step - first) * MOST_PLANS / (stop - first)): p for p in reversed(plans)}
    return sorted(parts.values(), key=lambda p: p.step)


def _told(plan: PlanShown, stages: Iterable[str]) -> list[str]:
    return [f"{s} {plan[s].layout} on {plan[s].devices}" for s in stages if s in plan]


def _runs(scene: Scene, plans: Sequence[PlanFrom], stage: str) -> list[Run]:
    """The stretches in which a model-stage runs alike."""
    first, stop = scene.buckets[0].first, scene.buckets[-1].stop
    starts = [max(p.step, first) for p in plans]
    ends = [*starts[1:], stop]
    runs: list[Run] = []
    for plan, start, end in zip(plans, starts, ends, strict=True):
        own = plan.plan.get(stage)
        if own is None or end <= start:
            continue
        if runs and runs[-1][1] == start and runs[-1][2] == own:
            start = runs.pop()[0]
        runs.append((start, end, own))
    return runs


def _band(frame: Frame, row: int, stage: str, runs: Sequence[Run]) -> str:
    y = ROW * row + ROW - BAND - 4
    parts = [f'<text class="start" x="0" y="{y - 5}">{esc(stage)}</text>']
    for start, end, own in runs:
        x, width = frame.x(start), 100.0 * (frame.share(end) - frame.share(start))
        words = f"{stage} from step {start}: {own.layout} on {own.devices}"
        words += f"; {own.how}" if own.how else ""
        parts.append(
            f'<rect class="band {stage_style(stage)}" x="{x}" y="{y}" '
            f'width="{round(width, 2):g}%" height="{BAND}"><title>{esc(words)}</title></rect>'
        )
        parts += _labels(frame, stage, own, (start, end), y)
    return "".join(parts)


def _labels(frame: Frame, stage: str, own: StagePlan, run: tuple[int, int], y: int) -> list[str]:
    """The layout on its band, as long as there is room for; a screen has more than a telephone."""
    devices = "device" if own.count == 1 else "devices"
    forms = (
        f"{own.layout} on {own.devices}",
        f"{own.layout}, {own.count} {devices}",
        own.layout,
        f"{own.dp}/{own.pp}/{own.tp}",
    )
    parts: list[str] = []
    share = frame.share(run[1]) - frame.share(run[0])
    for style, pixels in WIDTHS.items():
        fits = [form for form in forms if LETTER * len(form) + 8 <= share * pixels]
        if fits:
            x = frame.x(run[0] + 0.004 * (frame.stop - frame.first))
            parts.append(
                f'<text class="onband {style} {stage_style(stage)}" x="{x}" y="{y + 15}">'
                f"{esc(fits[0])}</text>"
            )
    return parts


def _plan_table(plans: Sequence[PlanFrom], stages: Sequence[str]) -> str:
    rows: list[list[str]] = []
    before: dict[str, StagePlan] = {}
    for plan in plans:
        for stage in stages:
            own = plan.plan.get(stage)
            if own is None or before.get(stage) == own:
                continue
            rows.append(
                [
                    str(plan.step),
                    esc(stage),
                    esc(own.layout),
                    esc(own.devices),
                    esc(own.how or NONE),
                    seconds(plan.seconds),
                    size(plan.wire_bytes),
                ]
            )
        before = dict(plan.plan)
    head = ("from step", "model-stage", "layout", "devices", "how", "change took, s", "moved")
    return table("Plans by step", head, rows, left=(1, 2, 3, 4))
