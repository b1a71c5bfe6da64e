"""Every term of a decision: the plans that it was between, candidates, seconds and bytes."""

from collections.abc import Mapping, Sequence

from nereus_jax.report.page.markup import (
    NONE,
    count,
    details,
    esc,
    percent,
    seconds,
    size,
    table,
)
from nereus_jax.report.page.record import read_plan
from nereus_jax.report.page.rows import Row, mapping, number, numbers, objects, text
from nereus_jax.report.page.stages import in_order


def decision_terms(decision: Row) -> str:
    """What is behind a decision, as HTML."""
    now, target = read_plan(mapping(decision, "plan")), read_plan(mapping(decision, "target"))
    candidates = objects(decision, "candidates")
    parts = [_expected(decision), _plans(now, target), _candidates(candidates)]
    parts.append(details("Terms of the plan that holds", _price(mapping(decision, "current"))))
    for n, candidate in enumerate(candidates, 1):
        body = _price(mapping(candidate, "price")) + _transition(mapping(candidate, "transition"))
        name = f"Terms of candidate {n}: {esc(text(candidate, 'origin'))}"
        parts.append(details(name, body))
    return "".join(parts)


def _expected(decision: Row) -> str:
    work = numbers(decision, "workload")
    told = [f"{esc(name.replace('_', ' '))} {count(value)}" for name, value in work.items()]
    pool = text(decision, "pool").replace(",", ", ")
    return (
        f"<p>Pool: {esc(pool or NONE)}. Expected of the steps to come: "
        f"{', '.join(told) or NONE}. Everything in here is modelled.</p>"
    )


def _plans(now: Mapping[str, object], target: Mapping[str, object]) -> str:
    plans = [now, target] if target else [now]
    stages = in_order({stage for plan in plans for stage in plan})
    rows: list[list[str]] = []
    for stage in stages:
        cells = [_stage(plan.get(stage)) for plan in plans]
        if target and cells[0] == cells[1]:
            cells[1] = "the same"
        rows.append([esc(stage), *cells])
    head = ["model-stage", "plan that holds", *(["target"] if target else [])]
    return table("Plans", head, rows, left=(0, 1, 2))


def _stage(plan: object) -> str:
    if plan is None:
        return NONE
    layout, devices, how = (getattr(plan, name) for name in ("layout", "devices", "how"))
    return esc(f"{layout} on {devices}" + (f"; {how}" if how else ""))


def _candidates(candidates: Sequence[Row]) -> str:
    if not candidates:
        return "<p>No other plan was looked at.</p>"
    rows: list[list[str]] = []
    taken: list[str] = []
    for n, candidate in enumerate(candidates, 1):
        price, move = mapping(candidate, "price"), mapping(candidate, "transition")
        peak, limit = number(price, "peak_bytes"), number(price, "limit_bytes")
        share = percent(peak / limit) if peak is not None and limit else NONE
        rows.append(
            [
                str(n),
                esc(text(candidate, "origin")),
                seconds(number(price, "step_s")),
                seconds(number(candidate, "gain_s")),
                seconds(number(move, "seconds")),
                parts_text(numbers(move, "parts_s")),
                size(sum(numbers(move, "bytes").values())) if move else NONE,
                count(number(candidate, "payback_steps")),
                share,
                esc(text(candidate, "reason")),
            ]
        )
        taken.append("taken" if candidate.get("admitted") is True else "")
    head = (
        *("", "origin", "L_step, s", "gain, s", "L_tran, s", "its parts", "bytes moved"),
        *("pays back in, steps", "memory", "verdict"),
    )
    return table("Candidates", head, rows, left=(1, 5, 9), classes=taken)


def parts_text(parts: Mapping[str, float]) -> str:
    """The parts of a transition's seconds, in words; HTML."""
    return ", ".join(f"{esc(name)} {seconds(value)}" for name, value in parts.items()) or NONE


def _price(price: Row) -> str:
    """Seconds by operation class and bytes by kind, of each model-stage and in all."""
    stages = in_order([str(s) for s in mapping(price, "stages")])
    if not stages:
        return "<p>Not recorded.</p>"
    own = {stage: mapping(price, "stages", stage) for stage in stages}
    classes = list(dict.fromkeys(c for s in stages for c in numbers(own[s], "seconds_by_class")))
    time_rows = [
        [
            esc(stage),
            seconds(number(own[stage], "seconds")),
            *(seconds(number(own[stage], "seconds_by_class", c)) for c in classes),
            seconds(number(own[stage], "edge_s")),
            seconds(number(own[stage], "park_s")),
        ]
        for stage in stages
    ]
    kinds = list(dict.fromkeys(kind for s in stages for kind in numbers(own[s], "bytes")))
    byte_rows = [[esc(s), *(size(number(own[s], "bytes", kind)) for kind in kinds)] for s in stages]
    limit = size(number(price, "limit_bytes"))
    devices = [
        [esc(name.replace(",", ", ")), size(value), limit]
        for name, value in numbers(price, "device_bytes").items()
    ]
    head = ("model-stage", "seconds", *classes, "weight edge", "park")
    return (
        f"<p>L_step {seconds(number(price, 'step_s'))} s</p>"
        + table("Seconds by operation class", head, time_rows)
        + table("Bytes of a device by kind", ("model-stage", *kinds), byte_rows)
        + table("Bytes by device", ("devices", "peak", "limit"), devices)
    )


def _transition(move: Row) -> str:
    if not move:
        return "<p>Its transition was not asked for: it saves nothing.</p>"
    why = text(move, "reason")
    if move.get("executable") is False:
        return f"<p>Its transition cannot be made: {esc(why)}</p>"
    links = [[esc(name), size(value)] for name, value in numbers(move, "bytes").items()]
    devices = [
        [esc(name.replace(",", ", ")), size(value)]
        for name, value in numbers(move, "device_bytes").items()
    ]
    return (
        f"<p>L_tran {seconds(number(move, 'seconds'))} s: "
        f"{parts_text(numbers(move, 'parts_s'))}</p>"
        + table("Bytes of the transition by link", ("link", "bytes"), links)
        + table("Bytes by device in the transition", ("devices", "peak"), devices)
    )
