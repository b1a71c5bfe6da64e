"""The page as a whole."""

from collections.abc import Iterable

from nereus_jax.report.page.charts import figures
from nereus_jax.report.page.comparison import comparison_section
from nereus_jax.report.page.decisions import decisions_section
from nereus_jax.report.page.markup import details, esc, seconds
from nereus_jax.report.page.plan_figure import plan_figure
from nereus_jax.report.page.record import RunRecord
from nereus_jax.report.page.scene import make_scene
from nereus_jax.report.page.simulated import Comparison
from nereus_jax.report.page.style import STYLE
from nereus_jax.report.page.summary import step_means, summary

MOST_POINTS = 160
"""Points of a line; on a page of several runs fewer."""
MOST_POINTS_IN_ALL = 480
MOST_TERMS = 2_000_000
"""Characters of the terms of all decisions on a page."""
SIMULATED = "Simulated: nothing on this page was measured on a device."


def live_page(run: RunRecord) -> str:
    """The page of a run that trained."""
    policy = f"Controller: {run.policy}." if run.policy else "No controller."
    return _page(
        f"Run {run.name}",
        f'<p class="banner">Measured on {esc(run.where)}.</p><p>{esc(policy)}</p>'
        + (f'<p class="banner">The run ended early: {esc(run.failure)}</p>' if run.failure else "")
        + _notes(run.notes)
        + _run(run, "run", MOST_POINTS, MOST_TERMS),
    )


def simulated_page(name: str, found: Comparison) -> str:
    """The page of simulated policies.

    Args:
      name: of the directory.
      found: what is in it.
    """
    number = len(found.runs)
    points = max(min(MOST_POINTS, MOST_POINTS_IN_ALL // number), 40)
    opened = min(range(number), key=lambda i: (not found.runs[i].decisions, _mean_s(found.runs[i])))
    parts: list[str] = []
    for i, run in enumerate(found.runs):
        body = _notes(run.notes) + _run(run, f"run{i}", points, MOST_TERMS // number)
        failure = f'<p class="banner">{esc(run.failure)}</p>' if run.failure else ""
        summary_line = f"{esc(run.name)}: {seconds(_mean_s(run))} s a step (simulated)"
        parts.append(details(summary_line, failure + body, shown=i == opened, style="run"))
    return _page(
        f"Simulation {name}",
        f'<p class="banner">{SIMULATED}</p><p>{esc(found.job)}.</p>'
        + _notes(found.notes)
        + comparison_section(found)
        + "<h2>Runs (simulated)</h2>"
        + '<p class="note">One run of each policy, that of its first seed.</p>'
        + "".join(parts),
    )


def _mean_s(run: RunRecord) -> float:
    """Seconds a step with all that is beside; of the steps alone where no more is known."""
    total_s = sum(run.spent_s.values())
    return total_s / len(run.steps) if total_s else step_means(run)[0] or 0.0


def _run(run: RunRecord, key: str, points: int, terms: int) -> str:
    scene = make_scene(run, key, points)
    width = scene.buckets[0].stop - scene.buckets[0].first
    together = f" A point of a line stands for {width} steps." if width > 1 else ""
    note = f"Steps count from 0, as in the files.{together} Point at a chart for its values."
    return (
        summary(run)
        + f'<p class="note">{note}</p>'
        + f'<div class="figures">{plan_figure(scene)}{figures(scene)}</div>'
        + decisions_section(scene, terms)
    )


def _notes(notes: Iterable[str]) -> str:
    return "".join(f'<p class="banner">{esc(note)}</p>' for note in notes)


def _page(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{esc(title)} - nereus</title><style>{STYLE}</style></head>\n"
        f"<body><main><h1>{esc(title)}</h1>{body}</main></body></html>\n"
    )
