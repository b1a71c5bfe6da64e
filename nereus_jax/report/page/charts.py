"""The figures of one run: lengths, pool, memory, learning."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from nereus_jax.report.page.buckets import Bucket
from nereus_jax.report.page.charts_seconds import by_stage, stages_predicted, step_seconds
from nereus_jax.report.page.line_figure import Value, line_figure
from nereus_jax.report.page.markup import count, percent, plain, seconds, size
from nereus_jax.report.page.plot import chart, figure, legend, line, stairs, top
from nereus_jax.report.page.record import StepPoint
from nereus_jax.report.page.rows import number, whole
from nereus_jax.report.page.scene import Scene, change_key, drawn_together

UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
FAR = 20.0
"""Times the largest peak: a budget beyond is told, not drawn."""


def figures(scene: Scene) -> str:
    """All figures of a run but the plan's, those that there is something for."""
    every = (lengths, step_seconds, by_stage, stages_predicted, pool, memory, success, reward)
    return "".join(make(scene) for make in every)


def lengths(scene: Scene) -> str:
    """Response lengths over the steps."""
    values: Mapping[str, Value] = {
        "mean": lambda b: b.mean(lambda p: p.length_mean),
        "95th percentile": lambda b: b.mean(lambda p: p.length_p95),
        "longest": lambda b: b.most(lambda p: p.length_longest),
    }
    note = "A point is the mean over its steps; of the longest, the longest." * drawn_together(
        scene
    )
    return line_figure(scene, "lengths", "Response lengths, tokens", values, count, note=note)


def pool(scene: Scene) -> str:
    """Devices of the pool."""
    if all(p.devices is None for p in scene.run.steps):
        return _missing(scene, "pool", "Pool, devices", "The run's files do not tell the pool.")
    least = [b.least(lambda p: p.devices) for b in scene.buckets]
    high = top(b.most(lambda p: p.devices) for b in scene.buckets)
    frame = dataclasses.replace(scene.frame(high), whole=True)
    runs = [(b.first, b.stop, v) for b, v in zip(scene.buckets, least, strict=True)]

    def said(bucket: Bucket) -> list[str]:
        low, high = (f(lambda p: p.devices) for f in (bucket.least, bucket.most))
        return [
            f"{count(low)} devices" if low == high else f"{count(low)} to {count(high)} devices"
        ]

    sizes = [p.devices for p in scene.run.steps if p.devices is not None]
    drawn = chart(
        frame,
        [scene.marks(frame), stairs(frame, runs, "l0")],
        name=f"{scene.key}-pool",
        title="Devices of the pool over the steps",
        desc=f"{min(sizes)} to {max(sizes)} devices; {sizes[0]} at first, {sizes[-1]} at last.",
        label=count,
        hits=scene.hits(frame, said),
    )
    key = legend([("l0", "devices"), *change_key(scene)])
    note = "A point is the smallest pool of its steps." * drawn_together(scene)
    return figure(f"{scene.key}-pool-f", "Pool, devices", scene.badge, key + drawn, note=note)


def memory(scene: Scene) -> str:
    """The fullest device against what it may hold."""
    peaks = [p.peak_bytes for p in scene.run.steps if p.peak_bytes is not None]
    if not peaks:
        return ""
    peak, limits = max(peaks), _limits(scene)
    highest = max((v for _, _, v in limits), default=None)
    # A budget far above what is used would press the line to the ground; it is told instead.
    shown = [(a, b, v) for a, b, v in limits if v <= FAR * peak]
    one, unit = next(((n, u) for n, u in UNITS if peak >= n), UNITS[-1])
    frame = scene.frame(top(v / one for v in (peak, *(v for _, _, v in shown))))
    note = _memory_note(scene, peak, highest)

    def own(bucket: Bucket) -> float | None:
        most = bucket.most(lambda p: p.peak_bytes)
        return None if most is None else most / one

    drawn = chart(
        frame,
        [
            scene.marks(frame),
            line(frame, scene.points(own), "l0"),
            stairs(frame, [(a, b, v / one) for a, b, v in shown], "l1"),
        ],
        name=f"{scene.key}-memory",
        title="Memory of the fullest device over the steps, and its budget",
        desc=note,
        label=lambda v: f"{plain(v)} {unit}",
        hits=scene.hits(frame, lambda b: [f"{size(b.most(lambda p: p.peak_bytes))} on a device"]),
    )
    entries = [("l0", "fullest device"), *([("l1", "budget")] if shown else []), *change_key(scene)]
    title = "Memory against budget"
    key = legend(entries)
    return figure(f"{scene.key}-memory-f", title, scene.badge, key + drawn, note=note)


def _memory_note(scene: Scene, peak: float, limit: float | None) -> str:
    note = f"Fullest device: at most {size(peak)}"
    whole_bytes = scene.run.budget_bytes
    if limit is not None and limit != whole_bytes:
        note += f", {percent(peak / limit)} of the {size(limit)} that the planner allows itself"
    if whole_bytes is not None:
        note += f", {percent(peak / whole_bytes)} of a device's {size(whole_bytes)}"
    return note + ("." if limit is not None or whole_bytes is not None else "; no budget is known.")


def _limits(scene: Scene) -> list[tuple[float, float, float]]:
    """What a device may hold, by steps: the planner's limit, else the configured memory."""
    first, stop = scene.buckets[0].first, scene.buckets[-1].stop
    found = [
        (max(whole(d, "step") or 0, first), number(d, "current", "limit_bytes"))
        for d in scene.run.decisions
    ]
    known = [(step, limit) for step, limit in found if limit is not None]
    if not known:
        budget = scene.run.budget_bytes
        return [] if budget is None else [(first, stop, budget)]
    starts = [first, *(step for step, _ in known[1:])]
    ends = [*starts[1:], stop]
    return [(a, b, v) for a, b, (_, v) in zip(starts, ends, known, strict=True) if b > a]


def success(scene: Scene) -> str:
    """Success of the samples and of held-out prompts."""
    run = scene.run
    held_out = [
        ("held-out prompts", "l1", [(e.step, e.success) for e in run.evaluations]),
        ("held-out, greedy", "l2", [(e.step, e.greedy) for e in run.evaluations]),
    ]
    return _learning(
        scene,
        "success",
        "Success rate",
        lambda p: p.success,
        held_out,
        lambda v: f"{v:.0%}",
        percent,
    )


def reward(scene: Scene) -> str:
    """Reward of the samples and of held-out prompts."""
    held_out = [("held-out prompts", "l1", [(e.step, e.reward) for e in scene.run.evaluations])]
    return _learning(scene, "reward", "Mean reward", lambda p: p.reward, held_out, plain, seconds)


def _learning(
    scene: Scene,
    name: str,
    title: str,
    of: Callable[[StepPoint], float | None],
    held_out: Sequence[tuple[str, str, Sequence[tuple[int, float | None]]]],
    label: Callable[[float], str],
    shown: Callable[[float], str],
) -> str:
    """A value of the training samples, and of evaluations: name, classes, step and value."""
    own = scene.points(lambda b: b.mean(of))
    known = [(text, style, [(s, v) for s, v in p if v is not None]) for text, style, p in held_out]
    known = [(text, style, p) for text, style, p in known if p]
    every = [v for _, v in own if v is not None] + [v for _, _, p in known for _, v in p]
    if not every:
        return ""
    low = -top([-min(every)]) if min(every) < 0 else 0.0
    frame = scene.frame(0.0 if low < 0 and max(every) <= 0 else top(every), low)
    last = {text: p[-1] for text, _, p in known}
    note = "; ".join(f"{text} after {s} steps: {shown(v)}" for text, (s, v) in last.items())

    def said(bucket: Bucket) -> list[str]:
        mean = bucket.mean(of)
        lines = [] if mean is None else [f"training samples {shown(mean)}"]
        return lines + [
            f"{text} after {s} steps {shown(v)}"
            for text, _, p in known
            for s, v in p
            if bucket.first <= s < bucket.stop or (s == bucket.stop == frame.stop)
        ]

    layers = [scene.marks(frame), line(frame, own, "l0")]
    layers += [line(frame, [(float(s), v) for s, v in p], style) for _, style, p in known]
    drawn = chart(
        frame,
        layers,
        name=f"{scene.key}-{name}",
        title=f"{title} over the steps",
        desc=note or f"{title} of the training samples over the steps.",
        label=label,
        hits=scene.hits(frame, said),
    )
    entries = [("l0", "training samples"), *((style, text) for text, style, _ in known)]
    key = legend([*entries, *change_key(scene)])
    return figure(f"{scene.key}-{name}-f", title, scene.badge, key + drawn, note=note)


def _missing(scene: Scene, name: str, title: str, why: str) -> str:
    return figure(f"{scene.key}-{name}-f", title, scene.badge, "", note=why)
