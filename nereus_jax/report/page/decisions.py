"""The decisions of a run: a table, and what is behind each of them."""

from nereus_jax.report.page.markup import (
    NONE,
    count,
    counted,
    details,
    esc,
    percent,
    seconds,
    table,
)
from nereus_jax.report.page.outcome import Outcome
from nereus_jax.report.page.rows import Row, mapping, number, numbers, objects, text, whole
from nereus_jax.report.page.scene import Scene
from nereus_jax.report.page.terms import decision_terms

MOST_ROWS = 300
"""Decisions in the table: all that moved the job, and the newest of the others."""
MOST_REASON = 120
"""Characters of a reason in the table."""
VERDICTS = ("keep", "admit", "urgent", "reject")


def decisions_section(scene: Scene, most_chars: int) -> str:
    """The decisions of a run.

    Args:
      scene: the run.
      most_chars: that the terms of its decisions may take on the page.
    """
    run = scene.run
    title = f'<h3 id="{esc(scene.key)}-decisions">Decisions</h3>'
    if not run.decisions:
        return f"{title}<p>{esc(_why_none(scene))}</p>"
    # What moved the job comes first where there is not room for all of them.
    by_weight = sorted(
        range(len(run.decisions)), key=lambda i: (not mapping(run.decisions[i], "target"), -i)
    )
    rows = sorted(by_weight[:MOST_ROWS])
    told: dict[int, str] = {}
    left = most_chars
    for i in by_weight[:MOST_ROWS]:
        made = _opened(scene, i)
        left -= len(made)
        if left < 0:
            break
        told[i] = made
    notes = [_measured_words(scene)]
    if len(rows) < len(run.decisions):
        notes.append(f"{len(rows)} of {len(run.decisions)} decisions are shown.")
    if len(told) < len(rows):
        notes.append(f"All terms of {len(told)} of them follow; the rest is in decisions.jsonl.")
    cells = [_row(scene, i, linked=i in told) for i in rows]
    head = (
        *("step", "trigger", "verdict", "L_step now, s", "target, s", f"{scene.badge}, s", "error"),
        *("L_tran, s", f"{scene.badge} L_tran, s", "pays back in, steps", "gamma x H, steps"),
        "reason",
    )
    return (
        title
        + f'<p class="note">{esc(" ".join(notes))}</p>'
        + table("Decisions", head, cells, left=(1, 2, 11))
        + "".join(told[i] for i in sorted(told))
    )


def _why_none(scene: Scene) -> str:
    run = scene.run
    if run.simulated:
        return (
            f"Policy {run.policy} recorded no decision: nothing made it look for another plan, or "
            "it is a bound or a system without a controller."
        )
    if run.policy:
        return f"The controller ({run.policy}) saw no reason to look for another plan."
    changes = ", ".join(str(plan.step) for plan in run.changes[:20])
    kept = (
        f"Its plan changed as configured, or after a loss, before steps {changes}."
        if changes
        else "It kept its plan."
    )
    return f"This run had no controller (control.policy is empty), so nothing was decided. {kept}"


def _measured_words(scene: Scene) -> str:
    return (
        f"{scene.badge.capitalize()} seconds are means of the steps under the plan that a decision "
        "led to, up to the next one, without those that compile; L_step, L_tran, payback: the "
        "controller's predictions."
    )


def _row(scene: Scene, place: int, *, linked: bool) -> list[str]:
    decision, found = scene.run.decisions[place], scene.found[place]
    step = count(whole(decision, "step"))
    bound, horizon = number(decision, "gamma"), number(decision, "horizon_steps")
    parts = "".join(
        f'<small class="part">{esc(name)} {seconds(value)}</small>'
        for name, value in numbers(_first_move(decision), "parts_s").items()
    )
    return [
        f'<a href="#{_name(scene, place)}">{step}</a>' if linked else step,
        esc(text(decision, "trigger")),
        verdict(decision),
        seconds(number(decision, "step_s_predicted")),
        seconds(number(decision, "step_s_target_predicted")),
        _steps_measured(found),
        percent(found.error, signed=True),
        seconds(number(decision, "transition_s_predicted")) + parts,
        _transition_measured(decision, found),
        count(number(decision, "payback_steps")),
        count(None if bound is None or horizon is None else bound * horizon),
        esc(_short(text(decision, "reason"))),
    ]


def _short(reason: str) -> str:
    """As much of a reason as a row has room for; all of it is with the terms."""
    return reason if len(reason) <= MOST_REASON else f"{reason[:MOST_REASON]} ..."


def _first_move(decision: Row) -> Row:
    """The transition that the record's L_tran is of: that of the target, or of the first one."""
    candidates = objects(decision, "candidates")
    taken = [c for c in candidates if c.get("admitted") is True] or candidates
    return mapping(taken[0], "transition") if taken else {}


def _steps_measured(found: Outcome) -> str:
    if found.step_s is None:
        return NONE
    how = f" <small>({counted(found.steps, 'step')})</small>" if found.steps else ""
    return seconds(found.step_s) + how


def _transition_measured(decision: Row, found: Outcome) -> str:
    if found.transition_s is not None:
        return seconds(found.transition_s)
    if not mapping(decision, "target"):
        return NONE
    return "through a checkpoint" if found.made else "not made"


def verdict(decision: Row) -> str:
    """The verdict, as HTML."""
    word = text(decision, "verdict")
    style = word if word in VERDICTS else "other"
    return f'<b class="verdict {style}">{esc(word or NONE)}</b>'


def _name(scene: Scene, place: int) -> str:
    return f"{esc(scene.key)}-decision-{place}"


def _opened(scene: Scene, place: int) -> str:
    decision = scene.run.decisions[place]
    summary = (
        f"Step {count(whole(decision, 'step'))}: {verdict(decision)} "
        f"({esc(text(decision, 'trigger'))}): {esc(text(decision, 'reason'))}"
    )
    # A link to what is inside opens it; a link to the part itself would not.
    body = f'<div id="{_name(scene, place)}">{decision_terms(decision)}</div>'
    return details(summary, body)
