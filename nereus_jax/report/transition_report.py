"""A transition graph for people and for other programs: text, JSON, Graphviz, a Gantt chart."""

import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.transition import LinkBytes, Operation, TransitionGraph, Unit

LINKS = ("local", "intra_node", "inter_node", "host", "storage")
COLORS = {
    "actor": "#4269d0",
    "critic": "#efb118",
    "reference": "#3ca951",
    "reward": "#a463f2",
}
CRITICAL = "#d62728"


def to_text(graph: TransitionGraph, title: str) -> str:
    """Operations in order, the choice for each model-stage, peak memory by device."""
    links = graph.link_bytes
    lines = [
        title,
        f"modelled: L_tran {graph.transition_s:.4g} s ({graph.exposed_compile_s:.4g} s of it "
        f"compiling); {len(graph.operations)} operations; "
        + ", ".join(f"{name} {_size(getattr(links, name))}" for name in LINKS),
        "old and new state fit side by side: " + ("yes" if graph.old_state_fits else "no"),
        "",
        "operations in dispatch order (* critical path; start and seconds are modelled)",
    ]
    lines += _table(_operation_rows(graph))
    lines += ["", "model-stages: each way with seconds, bytes between devices, peak on a device"]
    for model_stage, choice in graph.choices.items():
        lines.append(f"  {model_stage}: {choice.way} ({choice.reason})")
        for way, price in choice.prices.items():
            lines.append(
                f"    {way:<9} {price.seconds:10.4g} s {_size(price.link_bytes.wire):>12} "
                f"{_size(price.peak_bytes):>12}"
            )
    lines += ["", "peak of units by device, and what they may take"]
    peaks = zip(graph.devices, graph.peak_bytes, graph.capacity_bytes, strict=True)
    by_peak: dict[tuple[int, int], list[DeviceId]] = {}
    for device, peak, capacity in peaks:
        by_peak.setdefault((peak, capacity), []).append(device)
    for (peak, capacity), devices in by_peak.items():
        lines.append(f"  {_size(peak):>12} of {_size(capacity):<12} {_devices(devices)}")
    return "\n".join(lines) + "\n"


def _operation_rows(graph: TransitionGraph) -> list[list[str]]:
    critical = set(graph.critical_path)
    rows = [
        ["#", "", "model-stage", "operation", "start s", "seconds", *LINKS, "waits for", "units"]
    ]
    for i, operation in enumerate(graph.operations):
        sizes = [getattr(operation.link_bytes, name) for name in LINKS]
        waits = [str(j) for j in graph.data_edges[i]]
        waits += [f"{j} (memory)" for j in graph.resource_edges[i]]
        rows.append(
            [
                str(i),
                "*" if i in critical else "",
                str(operation.model_stage),
                str(operation.kind),
                f"{graph.start_s[i]:.4g}",
                f"{operation.seconds:.4g}",
                *(_size(n) if n else "" for n in sizes),
                ", ".join(waits),
                _units(operation),
            ]
        )
    return rows


def _units(operation: Operation) -> str:
    before = [*operation.reads, *operation.consumes]
    parts = [_unit_group(units) for units in (before, operation.produces)]
    return " -> ".join(p for p in parts if p)


def _unit_group(units: Sequence[Unit]) -> str:
    if not units:
        return ""
    first = units[0]
    count = f"{len(units)} x " if len(units) > 1 else ""
    where = _devices([d for u in units for d in u.devices])
    return f"{count}pp{first.pp} tp{first.tp} on {where}" + (" (host)" if first.parked else "")


def _devices(devices: Iterable[DeviceId]) -> str:
    """Devices with ranges of a host's neighbours drawn together: 0:0-3, 1:0."""
    parts: list[str] = []
    run: list[DeviceId] = []
    for device in sorted(devices):
        if run and device.host == run[-1].host and device.index == run[-1].index + 1:
            run.append(device)
            continue
        parts += _run(run)
        run = [device]
    return ", ".join([*parts, *_run(run)])


def _run(run: Sequence[DeviceId]) -> list[str]:
    if not run:
        return []
    return [f"{run[0]}-{run[-1].index}" if len(run) > 1 else str(run[0])]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell; empty columns are left out."""
    used = [c for c in range(len(rows[0])) if any(row[c] for row in rows[1:])]
    widths = {c: max(len(row[c]) for row in rows) for c in used}
    return ["  " + "  ".join(row[c].ljust(widths[c]) for c in used).rstrip() for row in rows]


def _size(num_bytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def to_json(graph: TransitionGraph, title: str) -> str:
    """All of a graph as one JSON object; seconds are modelled."""
    content = {
        "title": title,
        "modelled": True,
        "transition_s": graph.transition_s,
        "exposed_compile_s": graph.exposed_compile_s,
        "old_state_fits": graph.old_state_fits,
        "link_bytes": _links(graph.link_bytes),
        "critical_path": list(graph.critical_path),
        "operations": [_operation_json(graph, i) for i in range(len(graph.operations))],
        "model_stages": {
            str(stage): {
                "way": str(choice.way),
                "reason": choice.reason,
                "prices": {
                    str(way): {
                        "seconds": price.seconds,
                        "link_bytes": _links(price.link_bytes),
                        "peak_bytes": price.peak_bytes,
                    }
                    for way, price in choice.prices.items()
                },
            }
            for stage, choice in graph.choices.items()
        },
        "devices": {
            str(device): {"peak_bytes": peak, "capacity_bytes": capacity}
            for device, peak, capacity in zip(
                graph.devices, graph.peak_bytes, graph.capacity_bytes, strict=True
            )
        },
    }
    return json.dumps(content, indent=2) + "\n"


def _links(links: LinkBytes) -> dict[str, int]:
    return {name: getattr(links, name) for name in LINKS}


def _operation_json(graph: TransitionGraph, i: int) -> dict[str, Any]:
    operation = graph.operations[i]
    return {
        "kind": str(operation.kind),
        "model_stage": str(operation.model_stage),
        "reads": [_unit_json(u) for u in operation.reads],
        "consumes": [_unit_json(u) for u in operation.consumes],
        "produces": [_unit_json(u) for u in operation.produces],
        "source": None if operation.source is None else str(operation.source),
        "link_bytes": _links(operation.link_bytes),
        "start_s": graph.start_s[i],
        "seconds": operation.seconds,
        "data_edges": list(graph.data_edges[i]),
        "resource_edges": list(graph.resource_edges[i]),
    }


def _unit_json(unit: Unit) -> dict[str, Any]:
    devices = [str(d) for d in unit.devices]
    return {"pp": unit.pp, "tp": unit.tp, "devices": devices, "parked": unit.parked}


def to_dot(graph: TransitionGraph, title: str) -> str:
    """The graph for Graphviz: resource edges are dashed, the critical path is red."""
    critical = set(graph.critical_path)
    lines = ["digraph transition {", f"  label={json.dumps(title)};", "  node [shape=box];"]
    for i, operation in enumerate(graph.operations):
        label = (
            f"{i} {operation.kind}\n{operation.model_stage}\n{operation.seconds:.3g} s, "
            f"{_size(operation.link_bytes.wire)}"
        )
        color = f', color="{CRITICAL}", penwidth=2' if i in critical else ""
        lines.append(f"  n{i} [label={json.dumps(label)}{color}];")
    for i in range(len(graph.operations)):
        lines += [f"  n{j} -> n{i};" for j in graph.data_edges[i]]
        lines += [f"  n{j} -> n{i} [style=dashed];" for j in graph.resource_edges[i]]
    return "\n".join([*lines, "}"]) + "\n"


def to_svg(graph: TransitionGraph, title: str) -> str:
    """A Gantt chart with a row for each device; the critical path has a red frame."""
    left, top, width = 70, 40, 1000
    row = max(3.0, min(18.0, 1600 / max(len(graph.devices), 1)))
    span_s = max(graph.end_s, default=0.0) or 1.0
    place = {device: n for n, device in enumerate(graph.devices)}
    height = top + row * len(graph.devices) + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 20}" '
        f'height="{height:.0f}" font-family="sans-serif" font-size="11">',
        f'<text x="{left}" y="16" font-size="13">{html.escape(title)}</text>',
        f'<text x="{left}" y="31">modelled, {graph.transition_s:.4g} s; a red frame marks the '
        f"critical path</text>",
    ]
    every = max(1, round(12 / row))
    for device, n in place.items():
        if n % every == 0:
            parts.append(f'<text x="4" y="{top + row * (n + 0.5) + 4:.1f}">{device}</text>')
    for i, operation in enumerate(graph.operations):
        parts += _bars(graph, i, operation, place, (left, top, width / span_s, row))
    bottom = top + row * len(graph.devices)
    for n in range(6):
        x = left + width * n / 5
        parts.append(f'<line x1="{x}" x2="{x}" y1="{top}" y2="{bottom:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x}" y="{bottom + 14:.1f}">{span_s * n / 5:.3g} s</text>')
    for n, (role, color) in enumerate(COLORS.items()):
        x = left + 110 * n
        parts.append(
            f'<rect x="{x}" y="{bottom + 24:.1f}" width="10" height="10" fill="{color}"/>'
            f'<text x="{x + 14}" y="{bottom + 33:.1f}">{role}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bars(
    graph: TransitionGraph,
    i: int,
    operation: Operation,
    place: Mapping[DeviceId, int],
    scale: tuple[float, float, float, float],
) -> list[str]:
    """The rectangles of an operation, one for each run of neighbouring rows."""
    left, top, pixels_per_s, row = scale
    if not operation.seconds:
        return []
    rows = sorted(place[d] for d in operation.devices if d in place)
    runs: list[list[int]] = []
    for n in rows:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    frame = f' stroke="{CRITICAL}" stroke-width="2"' if i in graph.critical_path else ""
    name = html.escape(f"{i} {operation.kind} {operation.model_stage} {operation.seconds:.4g} s")
    x, bar = left + graph.start_s[i] * pixels_per_s, max(operation.seconds * pixels_per_s, 1.0)
    opacity = 0.95 if operation.model_stage.stage == "TRAIN" else 0.6
    return [
        f'<rect x="{x:.2f}" y="{top + row * run[0] + 0.5:.1f}" width="{bar:.2f}" '
        f'height="{row * len(run) - 1:.1f}" fill="{COLORS[operation.model_stage.role]}" '
        f'fill-opacity="{opacity}"{frame}><title>{name}</title></rect>'
        for run in runs
    ]


FORMATS: Mapping[str, Callable[[TransitionGraph, str], str]] = {
    "text": to_text,
    "json": to_json,
    "dot": to_dot,
    "svg": to_svg,
}
