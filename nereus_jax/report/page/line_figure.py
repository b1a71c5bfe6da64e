"""Figures of lines over the steps, from 0 on."""

from collections.abc import Callable, Mapping

from nereus_jax.report.page.buckets import Bucket
from nereus_jax.report.page.plot import chart, figure, legend, line, top
from nereus_jax.report.page.scene import Scene, change_key

Value = Callable[[Bucket], float | None]


def line_figure(
    scene: Scene,
    name: str,
    title: str,
    values: Mapping[str, Value],
    label: Callable[[float | None], str],
    *,
    note: str = "",
) -> str:
    """A figure of lines from 0 on; empty where there is no value."""
    there = {
        text: of for text, of in values.items() if any(of(b) is not None for b in scene.buckets)
    }
    if not there:
        return ""
    frame = scene.frame(top(of(b) for of in there.values() for b in scene.buckets))
    styles = {text: f"l{i}" for i, text in enumerate(values)}
    ends = {text: [v for _, v in scene.points(of) if v is not None] for text, of in there.items()}
    drawn = chart(
        frame,
        [
            scene.marks(frame),
            *(line(frame, scene.points(of), styles[text]) for text, of in there.items()),
        ],
        name=f"{scene.key}-{name}",
        title=f"{title} over the steps",
        desc="; ".join(
            f"{text} from {label(v[0])} to {label(v[-1])}, at most {label(max(v))}"
            for text, v in ends.items()
        ),
        label=label,
        hits=scene.hits(frame, lambda b: [f"{text} {label(of(b))}" for text, of in there.items()]),
    )
    key = legend([*((styles[text], text) for text in there), *change_key(scene)])
    return figure(f"{scene.key}-{name}-f", title, scene.badge, key + drawn, note=note)
