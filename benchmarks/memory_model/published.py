"""Memory of training steps that others published, against the same bookkeeping for their engines.

Their engines are not ours, so what a layer keeps follows their papers: all layers recomputed from
their inputs (Chen et al. 2016), 34 bytes of activations a token and hidden unit and 5 of scores a
head and position in the one layer that is recomputed (Korthikanti et al. 2022, divided by tp), 1F1B
with as many microbatches in flight as pipeline ranks (Narayanan et al. 2021), optimizer state over
dp under ZeRO-1 and all state under FSDP (Rajbhandari et al. 2020). One number for each engine, what
it takes beside (contexts, communicators, buckets, fragments), is learned from every second row.
"""

import csv
import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np

GIB = 2**30
BLOOM_VOCAB = 250_880
CAPACITY_GIB = {"80GB": 79.35, "96GB": 95.6}
"""Memory that the driver reports of cards sold with so many GB."""
SELECTIVE_BYTES = 20.0
"""A token, hidden unit and layer, where every other product is recomputed (torchtitan)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes that bytes follow from."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    params: float
    tied: bool = True


MODELS = {
    "InternLM-7B": Model(
        layers=32, hidden=4096, heads=32, vocab=103_168, params=7.32e9, tied=False
    ),
    "InternLM-20B": Model(
        layers=60, hidden=5120, heads=40, vocab=103_168, params=20.1e9, tied=False
    ),
    "Llama-3.1-8B": Model(
        layers=32, hidden=4096, heads=32, vocab=128_256, params=8.03e9, tied=False
    ),
    "Llama-3.1-70B": Model(
        layers=80, hidden=8192, heads=64, vocab=128_256, params=70.6e9, tied=False
    ),
    "Llama-3.1-405B": Model(
        layers=126, hidden=16384, heads=128, vocab=128_256, params=405.9e9, tied=False
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A published row and what it says of memory.

    Attributes:
      engine: whose row.
      name: for the report.
      modelled_gib: by this bookkeeping, without what the engine takes beside.
      measured_gib: None: out of memory.
      capacity_gib: of the card.
    """

    engine: str
    name: str
    modelled_gib: float
    measured_gib: float | None
    capacity_gib: float


def read_rows(path: Path) -> list[Row]:
    """All rows with a memory column whose model is known."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["mem_gb"]]
    return [made for row in rows if (made := _row(row)) is not None]


def _number(row: dict[str, str], key: str, default: float) -> float:
    return float(row[key]) if row[key] else default


def _row(row: dict[str, str]) -> Row | None:
    engine = next(
        (e for e in ("bigscience", "InternEvo", "torchtitan") if e in row["source"]), None
    )
    model = _bloom(row) if engine == "bigscience" else MODELS.get(row["model"])
    if engine is None or model is None:
        return None
    tp, pp = _number(row, "tp", 1.0), _number(row, "pp", 1.0)
    cp = _number(row, "cp", 1.0)
    dp = _number(row, "dp", 0.0) or max(_number(row, "n_gpus", 1.0) / (tp * pp), 1.0)
    tokens = _number(row, "mbs", 1.0) * _number(row, "seq_len", 2048.0) / cp
    if engine == "torchtitan" and pp > 1:
        tokens /= pp  # the local batch is split into as many microbatches as ranks
    name = f"{row['model']} dp{dp:g} tp{tp:g} pp{pp:g} {row['shard']} mbs {row['mbs']}"
    return Row(
        engine=engine,
        name=f"{name} {row['precision']} {row['notes'].split(';')[0][:28]}",
        modelled_gib=_bytes(row, engine, model, (dp * cp, pp, tp), tokens) / GIB,
        measured_gib=None if row["mem_gb"] == "OOM" else float(row["mem_gb"]),
        capacity_gib=next(
            g for k, g in CAPACITY_GIB.items() if k.split("GB")[0] in row["hardware"]
        ),
    )


def _bloom(row: dict[str, str]) -> Model | None:
    found = re.search(r"hidden (\d+)", row["notes"])
    if found is None:
        return None
    hidden, params = int(found[1]), float(row["params_b"]) * 1e9
    layers = re.search(r"layers (\d+)", row["notes"])
    heads = re.search(r"heads (\d+)", row["notes"])
    if re.search(r"NHIDDEN (\d+)", row["notes"]):
        hidden = int(re.search(r"NHIDDEN (\d+)", row["notes"])[1])  # type: ignore[index]
    count = round((params - BLOOM_VOCAB * hidden) / (12 * hidden**2))
    if layers and abs(int(layers[1]) - count) <= 2:
        count = int(layers[1])
    return Model(
        layers=count,
        hidden=hidden,
        heads=int(heads[1]) if heads else hidden // 128,
        vocab=BLOOM_VOCAB,
        params=params,
    )


def _bytes(
    row: dict[str, Any],
    engine: str,
    model: Model,
    degrees: tuple[float, float, float],
    tokens: float,
) -> float:
    """State and activations of the first pipeline rank."""
    dp, pp, tp = degrees
    ends = model.vocab * model.hidden * (1 if model.tied or pp > 1 else 2)
    body = model.params - model.vocab * model.hidden * (1 if model.tied else 2)
    ranked = body / model.layers * np.ceil(model.layers / pp)
    local = (ranked + ends) / tp
    if "FSDP" in row["shard"] or not row["shard"]:
        gathered = 2 * 2 * body / model.layers / tp  # a layer and the next one
        state = local * (16.0 if engine == "InternEvo" else 12.0) / dp + gathered
    else:
        grads = 2.0 if row["precision"] == "fp16" else 6.0
        sharded = 12.0 / (dp if "-0" not in row["shard"] else 1.0)
        state = local * (2.0 + grads + sharded)
    return state + _activations(row, model, (pp, tp), tokens)


def _activations(
    row: dict[str, Any], model: Model, degrees: tuple[float, float], tokens: float
) -> float:
    pp, tp = degrees
    sequence = _number(row, "seq_len", 2048.0)
    layers_here = np.ceil(model.layers / pp)
    fused = "bigscience" not in row["source"]  # attention without scores in memory
    scores = 0.0 if fused else 5.0 * model.heads * sequence / model.hidden
    layer = tokens * model.hidden * (34.0 + scores) / tp
    logits = tokens * model.vocab / tp * (2.0 + 4.0 + 4.0) if pp == 1 else 0.0
    if row["act_ckpt"] == "selective":
        return tokens * model.hidden * SELECTIVE_BYTES * layers_here / tp + logits
    shared = tp if fused else 1.0  # sequence parallelism cuts what is kept
    return tokens * model.hidden * 2.0 * layers_here * pp / shared + max(layer, logits)


def compare(rows: list[Row]) -> dict[str, Any]:
    """Errors by row; what each engine takes beside is learned from every second of its rows."""
    report: list[dict[str, Any]] = []
    for engine in dict.fromkeys(row.engine for row in rows):
        own = [row for row in rows if row.engine == engine]
        ran = [row for row in own if row.measured_gib is not None]
        beside = float(np.median([r.measured_gib - r.modelled_gib for r in ran[::2]]))  # type: ignore[operator]
        learned = {id(row) for row in ran[::2]}
        for row in own:
            total = float(row.modelled_gib) + beside
            report.append(
                {
                    "engine": engine,
                    "row": row.name,
                    "modelled_gib": round(total, 1),
                    "measured_gib": row.measured_gib,
                    "error": None if row.measured_gib is None else total / row.measured_gib - 1,
                    "learned_from": id(row) in learned,
                    "called_infeasible": total > row.capacity_gib,
                }
            )
    out = [r for r in report if r["measured_gib"] is None]
    ran = [r for r in report if r["measured_gib"] is not None]
    held_out = [abs(r["error"]) for r in ran if not r["learned_from"]]
    return {
        "rows": report,
        "oom_rows": len(out),
        "oom_rows_caught": sum(bool(r["called_infeasible"]) for r in out) / max(len(out), 1),
        "false_infeasible_share": sum(bool(r["called_infeasible"]) for r in ran) / max(len(ran), 1),
        "held_out_median_error": float(np.median(held_out)) if held_out else None,
        "held_out_max_error": float(np.max(held_out)) if held_out else None,
    }
