"""The figures of a run in tiles."""

import itertools

from nereus_jax.report.page.markup import count, counted, duration, facts, percent, seconds
from nereus_jax.report.page.record import RunRecord

Tiles = dict[str, tuple[str, str]]
"""Name -> value, and what is to be known of it."""


def summary(run: RunRecord) -> str:
    """What a run came to."""
    tiles = _steps(run) | _changes(run) | _losses(run) | _work(run) | _learned(run)
    return facts(tiles)


def step_means(run: RunRecord) -> tuple[float | None, float | None]:
    """Mean seconds of all steps, and of those without compilation."""
    every = [p.step_s for p in run.steps if p.step_s is not None]
    settled = [p.step_s for p in run.steps if p.step_s is not None and p.settled]
    return _mean(every), _mean(settled)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _steps(run: RunRecord) -> Tiles:
    every, settled = step_means(run)
    planned = f"of {run.planned_steps:,}" if run.planned_steps else ""
    tiles: Tiles = {"Steps": (f"{len(run.steps):,}", planned)}
    total_s = sum(run.spent_s.values())
    if run.simulated:
        if total_s:
            mean = total_s / len(run.steps)
            tiles["Seconds a step"] = (seconds(mean), "simulated, all time counted")
            without = (total_s - run.spent_s.get("compiling", 0.0)) / len(run.steps)
            tiles["Without compilation"] = (seconds(without), "s a step, simulated")
        tiles["Of that the step itself"] = (seconds(every), "s, simulated")
        return tiles
    tiles["Seconds a step"] = (seconds(every), "measured, with compilation")
    number = sum(p.settled for p in run.steps)
    of = f"mean of the {number:,} steps in which no program ran for the first time"
    tiles["Without compilation"] = (seconds(settled), of)
    return tiles


def _changes(run: RunRecord) -> Tiles:
    took = [c.seconds for c in run.changes if c.seconds is not None]
    total_s = sum(run.spent_s.values()) or (sum(p.step_s or 0.0 for p in run.steps) + sum(took))
    more = (
        f"{duration(sum(took))} in all, {percent(sum(took) / total_s)} of the time" if took else ""
    )
    if took and len(took) < len(run.changes):
        more += f"; {len(run.changes) - len(took)} without a time of their own"
    counted = len(run.changes) if run.transitions is None else run.transitions
    return {"Changes of plan": (str(counted), more)}


def _losses(run: RunRecord) -> Tiles:
    sizes = [p.devices for p in run.steps if p.devices is not None]
    tiles: Tiles = {}
    if sizes:
        falls = [a - b for a, b in itertools.pairwise(sizes) if b < a]
        ends = f"{sizes[0]} at first, {sizes[-1]} at last"
        tiles["Devices lost"] = (
            str(sum(falls)),
            f"in {counted(len(falls), 'fall')} of the pool; {ends}",
        )
    failed = sum(p.out_of_memory for p in run.steps)
    if run.simulated or failed or run.out_of_memory:
        more = "steps that did not fit at first" + (", and the last" if run.out_of_memory else "")
        tiles["Out of memory"] = (str(failed + run.out_of_memory), more)
    return tiles


def _work(run: RunRecord) -> Tiles:
    tiles: Tiles = {}
    step_s = sum(p.step_s or 0.0 for p in run.steps)
    if run.samples:
        tiles["Samples"] = (count(run.samples), "")
    tokens = sum(p.tokens or 0.0 for p in run.steps)
    if tokens and step_s:
        tiles["Tokens a second"] = (
            count(round(tokens / step_s)),
            "prompts and responses, in steps",
        )
    elif run.samples and run.spent_s:
        rate = run.samples / sum(run.spent_s.values())
        tiles["Samples a second"] = (seconds(rate), "simulated, all time counted")
    if run.compile_s is not None:
        tiles["Waited for compilers"] = (duration(run.compile_s), "start and changes of plan too")
    return tiles


def _learned(run: RunRecord) -> Tiles:
    known = [e for e in run.evaluations if e.success is not None]
    if known:
        greedy = "" if known[-1].greedy is None else f", greedy {percent(known[-1].greedy)}"
        more = f"held-out, after {known[-1].step} steps{greedy}"
        return {"Success": (percent(known[-1].success), more)}
    shown = [p for p in run.steps if p.success is not None]
    if shown:
        more = f"of training samples, step {shown[-1].step}"
        return {"Success": (percent(shown[-1].success), more)}
    return {}
