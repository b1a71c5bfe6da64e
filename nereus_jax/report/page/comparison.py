"""Simulated policies side by side: a table, bars, and where the time went."""

from collections.abc import Callable

from nereus_jax.report.page.markup import (
    NONE,
    count,
    counted,
    esc,
    percent,
    plain,
    seconds,
    table,
)
from nereus_jax.report.page.plot import figure, legend, svg_start, ticks, top
from nereus_jax.report.page.rows import Row, number
from nereus_jax.report.page.simulated import Comparison

KINDS = {
    "steps": "s0",
    "transitions": "s5",
    "compiling": "s6",
    "dropped": "s4",
    "restarting": "s3",
    "repeating": "s2",
    "checkpoints": "s1",
    "waiting": "s7",
}
"""What a simulated run does, and the class of its colour."""
ROW = 46
BAR = 20


def comparison_section(found: Comparison) -> str:
    """Policies side by side; empty where there are no figures."""
    if not found.policies:
        return ""
    notes = [
        f"Policy {name}, {failure}" for name, said in found.failures.items() for failure in said
    ]
    failed = "".join(f'<p class="banner">{esc(note)}</p>' for note in notes)
    seeds = counted(found.seeds, "seed")
    note = (
        f"Means over {seeds}, ± the standard deviation over them. The gap to the oracle is that of "
        "the mean seconds a step; the oracle sees the trace and moves for free."
    )
    return (
        f'<h2>Policies (simulated)</h2><p class="note">{note}</p>{_table(found)}{failed}'
        f'<div class="figures">{_bars(found)}</div>'
    )


def _table(found: Comparison) -> str:
    rows = [
        [
            esc(name),
            _spread(f, "mean_step_s", seconds),
            _spread(f, "gap_to_oracle", percent),
            _spread(f, "transitions", count),
            _spread(f, "transition_share", percent),
            _spread(f, "oom", count),
            seconds(_hours(number(f, "total_s"))),
            _spread(f, "gpu_hours", seconds),
        ]
        for name, f in found.policies.items()
    ]
    head = ("policy", "s a step", "gap to oracle", "changes of plan", "share of time in them")
    return table("Policies", (*head, "out of memory", "hours", "GPU-hours"), rows)


def _hours(value: float | None) -> float | None:
    return None if value is None else value / 3600.0


def _spread(figures: Row, name: str, shown: Callable[[float | None], str]) -> str:
    value, spread = number(figures, name), number(figures, f"{name}_std")
    if value is None:
        return NONE
    return shown(value) + (f" <small>± {shown(spread)}</small>" if spread else "")


def _bars(found: Comparison) -> str:
    """Seconds a step of each policy by what they went to."""
    steps = _steps(found)
    bars = {
        name: {kind: s / steps[name] for kind, s in found.spent_s.get(name, {}).items() if s > 0}
        for name in found.policies
        if steps.get(name) and found.spent_s.get(name)
    }
    if not bars:
        return ""
    high = top(sum(parts.values()) for parts in bars.values())
    kinds = [kind for kind in KINDS if any(kind in parts for parts in bars.values())]
    parts: list[str] = []
    for row, (name, own) in enumerate(bars.items()):
        y, at = ROW * row + ROW - BAR - 6, 0.0
        total = sum(own.values())
        words = f"{name}: {seconds(total)} s a step"
        parts.append(f'<text class="start" x="0" y="{y - 6}">{esc(words)}</text>')
        for kind in kinds:
            if kind in own:
                width = 100.0 * own[kind] / high
                said = f"{name}: {kind} {seconds(own[kind])} s a step, {percent(own[kind] / total)}"
                parts.append(
                    f'<rect class="band {KINDS[kind]}" x="{at:.2f}%" y="{y}" width="{width:.2f}%" '
                    f'height="{BAR}"><title>{esc(said)}</title></rect>'
                )
                at += width
    bottom = ROW * len(bars) + 4
    parts.append(f'<line class="axis" x1="0" x2="100%" y1="{bottom}" y2="{bottom}"/>')
    for value in ticks(0.0, high):
        share = value / high
        anchor = "start" if share < 0.03 else "end" if share > 0.97 else "mid"
        x = f"{100 * share:.2f}%"
        parts.append(f'<text class="{anchor}" x="{x}" y="{bottom + 18}">{plain(value)}</text>')
    desc = "; ".join(f"{name} {seconds(sum(own.values()))}" for name, own in bars.items())
    drawn = svg_start("spent", "Seconds a step by policy", desc, bottom + 24)
    key = legend((f"area {KINDS[kind]}", kind) for kind in kinds)
    return figure(
        "spent-f",
        "Seconds a step, by what they went to",
        "simulated",
        f'{key}<div class="bands">{drawn}{"".join(parts)}</svg></div>',
        wide=True,
    )


def _steps(found: Comparison) -> dict[str, float]:
    """Steps of each policy's runs, on average: all seconds over those of a step."""
    steps: dict[str, float] = {}
    for name, figures in found.policies.items():
        total_s, mean_s = number(figures, "total_s"), number(figures, "mean_step_s")
        if total_s and mean_s:
            steps[name] = total_s / mean_s
    return steps
