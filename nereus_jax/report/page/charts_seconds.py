"""The figures of seconds: predicted against measured, and by model-stage."""

from collections.abc import Callable, Mapping

from nereus_jax.report.page.buckets import Bucket
from nereus_jax.report.page.line_figure import Value, line_figure
from nereus_jax.report.page.markup import counted, percent, plain, seconds
from nereus_jax.report.page.outcome import errors
from nereus_jax.report.page.plot import chart, figure, legend, line, stack, stairs, top
from nereus_jax.report.page.record import StepPoint
from nereus_jax.report.page.scene import (
    Scene,
    about_compilation,
    change_key,
    settled_mean,
    settled_values,
)
from nereus_jax.report.page.stages import EDGES, in_order, stage_style

FAR = 4.0
"""Times the longest step: a prediction beyond is cut off."""


def step_seconds(scene: Scene) -> str:
    """Seconds of a step: those that were predicted when its plan was chosen, and those it took."""

    def own(bucket: Bucket) -> float | None:
        return settled_mean(bucket, lambda p: p.step_s)

    predicted = _in_force(scene)
    settled = settled_values(scene, lambda p: p.step_s) or [own(b) or 0.0 for b in scene.buckets]
    # A prediction that is far off must not press the steps to the ground.
    near = [v for _, _, v in predicted if v < FAR * max(settled)]
    frame = scene.frame(top([*settled, *near]))
    error = errors(scene.found)
    note = ""
    if error is not None:
        known = counted(sum(o.error is not None for o in scene.found), "decision")
        note = f"Predicted at {known}; off by {percent(error[0])} on average, by "
        note += f"{percent(error[1])} at most."
    arrows = scene.over(frame, own)
    note = f"{note} {about_compilation(scene, arrows)}".strip()

    def said(bucket: Bucket) -> list[str]:
        lines = [f"{seconds(own(bucket))} s {scene.badge}"]
        if not any(p.settled for p in bucket.points):
            lines.append("programs ran for the first time: compilation is in it")
        held = [v for a, b, v in predicted if a < bucket.stop and b > bucket.first]
        return lines + [f"{seconds(v)} s predicted" for v in held[-1:]]

    drawn = chart(
        frame,
        [
            scene.marks(frame),
            line(frame, scene.points(own), "l0"),
            stairs(frame, predicted, "l1"),
            arrows,
        ],
        name=f"{scene.key}-seconds",
        title="Seconds of a step over the steps",
        desc=note or f"Seconds of each step, {scene.badge}.",
        label=plain,
        hits=scene.hits(frame, said),
    )
    entries = [("l0", scene.badge), *([("l1", "predicted")] if predicted else [])]
    title = f"Step seconds, predicted against {scene.badge}" if predicted else "Step seconds"
    key = legend([*entries, *change_key(scene)])
    return figure(f"{scene.key}-seconds-f", title, scene.badge, key + drawn, note=note)


def _in_force(scene: Scene) -> list[tuple[float, float, float]]:
    """The newest prediction of a step over the steps: first place, last place, seconds."""
    known = [
        (o.first, o.last + 1, o.predicted_s)
        for o in scene.found
        if o.last >= o.first and o.predicted_s is not None
    ]
    starts = [first for first, _, _ in known[1:]]
    return [
        (first, min(stop, *(s for s in starts[i:] if s > first), stop), value)
        for i, (first, stop, value) in enumerate(known)
    ]


def by_stage(scene: Scene) -> str:
    """Seconds of the model-stages on top of each other."""
    stages = in_order({stage for p in scene.run.steps for stage in p.stage_s})
    if not stages:
        return ""
    parts: dict[str, Callable[[StepPoint], float]] = {s: _seconds_of(s) for s in stages}
    if any(p.edge_s for p in scene.run.steps):
        parts[EDGES] = lambda p: p.edge_s
    columns = {
        b.first: [settled_mean(b, of) or 0.0 for of in parts.values()] for b in scene.buckets
    }
    totals = settled_values(scene, lambda p: sum(of(p) for of in parts.values()))
    frame = scene.frame(top(totals or map(sum, columns.values())), height=230)
    sums = [sum(column) for column in zip(*columns.values(), strict=True)]
    whole_s = sum(sums) or 1.0
    styles = [stage_style(name) for name in parts]
    areas = [(b.first, b.stop, columns[b.first]) for b in scene.buckets]

    def said(bucket: Bucket) -> list[str]:
        own = zip(parts, columns[bucket.first], strict=True)
        return [f"{name} {seconds(s)} s" for name, s in own]

    arrows = scene.over(frame, lambda b: sum(columns[b.first]))
    drawn = chart(
        frame,
        [
            stack(frame, areas, styles),
            scene.marks(frame),
            arrows,
        ],
        name=f"{scene.key}-stages",
        title="Seconds of each model-stage, stacked",
        desc="; ".join(f"{n} {percent(s / whole_s)}" for n, s in zip(parts, sums, strict=True)),
        label=plain,
        hits=scene.hits(frame, said),
    )
    key = legend((f"area {style}", name) for style, name in zip(styles, parts, strict=True))
    note = (
        "Model-stages that ran at the same time are stacked, too: a column may be higher than its "
        f"step was long. {about_compilation(scene, arrows)}"
    )
    title = "Seconds by model-stage"
    return figure(f"{scene.key}-stages-f", title, scene.badge, key + drawn, note=note.strip())


def _seconds_of(stage: str) -> Callable[[StepPoint], float]:
    return lambda point: point.stage_s.get(stage, 0.0)


def stages_predicted(scene: Scene) -> str:
    """The calibrated cost model beside the stages' seconds, where the run has predicted them."""

    def predicted(point: StepPoint) -> float | None:
        return sum(point.stage_s_predicted.values()) if point.stage_s_predicted else None

    def own(point: StepPoint) -> float | None:
        stages = point.stage_s_predicted
        return sum(point.stage_s.get(s, 0.0) for s in stages) if stages else None

    if all(predicted(p) is None for p in scene.run.steps):
        return ""
    values: Mapping[str, Value] = {
        scene.badge: lambda b: settled_mean(b, own),
        "predicted by the cost model": lambda b: settled_mean(b, predicted),
    }
    mape = scene.run.calibration_mape
    note = "Sums over model-stages." + (
        "" if mape is None else f" The model was off by {percent(mape)} on average lately."
    )
    title = "Model-stages, predicted against measured seconds"
    return line_figure(scene, "model", title, values, plain, note=note)
