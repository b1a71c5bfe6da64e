"""Directories of runs with figures that can be worked out by hand, and a reader of pages."""

import json
from collections.abc import Iterable, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VOID = {"meta", "br", "link", "img", "input", "hr"}
STEP_S = (10.0, 2.0, 4.0, 5.0, 3.0, 1.0)
"""Step 0 compiles, and step 3 is the first one under another plan."""


def stage(dp: int, pp: int, tp: int, devices: str) -> dict[str, Any]:
    how = {"microbatch_size": 4, "microbatches": 2, "remat": False, "zero1": True, "parked": False}
    return {"dp": dp, "pp": pp, "tp": tp, "devices": devices, **how}


FIRST = {"actor-GENERATE": stage(4, 1, 2, "0:0-7"), "actor-TRAIN": stage(2, 2, 2, "0:0-7")}
SECOND = {"actor-GENERATE": stage(7, 1, 1, "0:0-6"), "actor-TRAIN": stage(1, 1, 4, "0:0-3")}


def price(step_s: float, limit_bytes: int = 4 * 2**30) -> dict[str, Any]:
    own = {
        "seconds": step_s / 2,
        "seconds_by_class": {"gemm": step_s / 4, "decode memory": step_s / 4},
        "edge_s": 0.001,
        "park_s": 0.0,
        "bytes": {"parameters": 2**30, "kv_cache": 2**20},
    }
    return {
        "step_s": step_s,
        "peak_bytes": 2**31,
        "limit_bytes": limit_bytes,
        "device_bytes": {"0:0-3": 2**31, "0:4-7": 2**30},
        "stages": {"actor-GENERATE": own, "actor-TRAIN": own},
    }


def candidate(step_s: float, gain_s: float, transition_s: float, **rest: Any) -> dict[str, Any]:
    return {
        "origin": "search",
        "plan": SECOND,
        "price": price(step_s),
        "transition": {
            "executable": True,
            "reason": "",
            "seconds": transition_s,
            "parts_s": {"move": 0.25, "setup": transition_s - 0.25, "compile": 0.0},
            "bytes": {"local": 0, "intra_node": 3 * 2**20, "inter_node": 2**20},
            "device_bytes": {"0:0-7": 2**20},
        },
        "by_checkpoint": False,
        "gain_s": gain_s,
        "payback_steps": transition_s / gain_s,
        "admitted": False,
        "reason": "no faster",
        **rest,
    }


def decision(step: int, verdict: str, **rest: Any) -> dict[str, Any]:
    """A rejected move that would take 6 s to save 0.5 s a step, unless told otherwise."""
    return {
        "step": step,
        "time_s": 12.5 * step,
        "trigger": "length_mean",
        "policy": "payback",
        "plan": FIRST,
        "target": None,
        "step_s_predicted": 3.0,
        "step_s_target_predicted": 2.5,
        "transition_s_predicted": 6.0,
        "payback_steps": 12.0,
        "gamma": 0.5,
        "horizon_steps": 8.0,
        "verdict": verdict,
        "reason": "pays back in 12 steps, more than gamma x H = 0.5 x 8 = 4",
        "pool": "0:0-7",
        "workload": {"response_tokens_mean": 100.0, "response_tokens_longest": 400.0},
        "current": price(3.0),
        "candidates": [candidate(2.5, 0.5, 6.0)],
        **rest,
    }


def admitted(step: int) -> dict[str, Any]:
    return decision(
        step,
        "admit",
        trigger="pool",
        target=SECOND,
        transition_s_predicted=1.25,
        payback_steps=2.5,
        reason="pays back in 2.5 steps, within gamma x H",
        candidates=[candidate(2.5, 0.5, 1.25, admitted=True, reason="taken")],
    )


def step_row(step: int, step_s: float, **rest: Any) -> dict[str, Any]:
    return {
        "step": step,
        "devices": 8 if step < 3 else 7,
        "reward_mean": 0.1 * step,
        "success_rate": 0.05 * step,
        "response_length_mean": 100.0 + 10 * step,
        "response_length_p95": 200.0 + 10 * step,
        "response_length_max": 300 + 10 * step,
        "tokens": 1000,
        "step_s": step_s,
        "stage_s": {"actor-GENERATE": step_s / 2, "actor-TRAIN": step_s / 4},
        "weight_edge_s": {"actor-TRAIN->actor-GENERATE": step_s / 8},
        "compile_s": {"exposed": 20.0 if step < 3 else 20.5, "hidden": 0.0, "set_up": 0.0},
        "peak_memory_bytes": 2**31 + step,
        **rest,
    }


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]], torn: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)


def live_run(directory: Path, *, policy: str = "payback", torn: str = "") -> Path:
    """Six steps, an evaluation, a refused and an admitted move before step 3."""
    rows: list[dict[str, Any]] = [step_row(i, s) for i, s in enumerate(STEP_S)]
    move = {
        "step": 3,
        "transition_s": 1.5,
        "transition_compile_s": 0.5,
        "transition_wire_bytes": 4 * 2**20,
        "transition_ways": {"actor-TRAIN": "direct"},
    }
    tested = {"step": 6, "eval_step": 6, "eval_success_rate": 0.625, "eval_reward_mean": 0.75}
    write_jsonl(directory / "metrics.jsonl", [*rows[:3], move, *rows[3:], tested], torn)
    plans = [
        {"step": 0, "device_kind": "cpu", "plan": FIRST},
        {"step": 3, "device_kind": "cpu", "plan": SECOND},
    ]
    write_jsonl(directory / "plans.jsonl", plans)
    if policy:
        write_jsonl(directory / "decisions.jsonl", [decision(1, "reject"), admitted(3)])
    config = {
        "num_steps": 8,
        "emulated_devices": 8,
        "device_memory_gib": 0.0,
        "control": {"policy": policy},
        "rollout": {"batch_size": 16, "samples_per_prompt": 2},
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def simulated_runs(directory: Path, policies: Sequence[str] = ("static", "payback")) -> Path:
    """Four steps of each policy; payback moves before step 2, in 3 s and 1 s of compilation."""
    figures: dict[str, Any] = {"simulated": True, "policies": {}, "runs": []}
    figures["job"] = {
        "model": "llama3-8b",
        "algorithm": "ppo",
        "hardware": "a100-80gb",
        "devices": 8,
        "device_memory_bytes": 80 * 2**30,
        "steps": 4,
        "prompts": 32,
    }
    for n, policy in enumerate(policies):
        moves = policy == "payback"
        rows = [
            {
                "simulated": True,
                "step": step,
                "start_s": 10.0 * step,
                "step_s": 10.0 - 4.0 * (moves and step >= 2),
                "stage_s": {"actor-GENERATE": 6.0, "actor-TRAIN": 2.0},
                "response_tokens_mean": 500.0,
                "response_tokens_p95": 900.0,
                "response_tokens_longest": 1000,
                "peak_memory_bytes": 40 * 2**30,
                "devices": 8,
                "samples": 32 * (step + 1),
            }
            for step in range(4)
        ]
        rows[0]["plan"] = FIRST
        if moves:
            rows[2] |= {"plan": SECOND, "before_s": {"transitions": 3.0, "compiling": 1.0}}
        write_jsonl(directory / f"{policy}-0" / "steps.jsonl", rows)
        made = [{**admitted(2), "step_s_target_predicted": 5.0}] if moves else []
        write_jsonl(directory / f"{policy}-0" / "decisions.jsonl", made)
        spent = {"steps": 32.0 if moves else 40.0, "transitions": 3.0 * moves}
        spent["compiling"] = 1.0 * moves
        total_s = sum(spent.values())
        own = {"mean_step_s": total_s / 4, "total_s": total_s, "gpu_hours": total_s * 8 / 3600}
        own |= {"transitions": 1.0 * moves, "transition_share": 4.0 * moves / total_s, "oom": 0.0}
        own |= {"gap_to_oracle": 0.125 + n, "gap_to_oracle_std": 0.0, "mean_step_s_std": 0.5}
        figures["policies"][policy] = own
        run = {"simulated": True, "policy": policy, "seed": 0, "failure": "", "spent_s": spent}
        figures["runs"].append(run)
    (directory / "figures.json").write_text(json.dumps(figures))
    return directory


class Page(HTMLParser):
    """A page taken apart; a tag that is not closed, or closed twice, is an error.

    Attributes:
      tags: how often each was opened.
      tables: by their names: rows of texts, the head first.
      tiles: figures of the summary by name.
      ids: of all elements.
      text: all of it, without what is in tables.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.attributes: list[tuple[str, str]] = []
        self.tables: dict[str, list[list[list[str]]]] = {}
        self.tiles: dict[str, str] = {}
        self.ids: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self._table: list[list[str]] | None = None
        self._tile = ""
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        if tag not in VOID:
            self._open.append(tag)
        values = {name: value or "" for name, value in attrs}
        self.attributes += values.items()
        if "id" in values:
            self.ids.append(values["id"])
        if values.get("role") == "region":
            self._table = []
            self.tables.setdefault(values["aria-label"], []).append(self._table)
        elif tag == "tr" and self._table is not None:
            self._table.append([])
        elif tag in ("td", "th") and self._table is not None:
            self._table[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, f"</{tag}> closes nothing"
        if tag == "table":
            self._table = None

    def handle_data(self, data: str) -> None:
        if self._table and self._table[-1]:
            self._table[-1][-1] += data
            return
        self.text += data
        here = self._open[-1] if self._open else ""
        if here == "dt":
            self._tile = data
        elif here == "dd":
            self.tiles[self._tile] = self.tiles.get(self._tile, "") + data

    def rows(self, name: str) -> list[dict[str, str]]:
        """The rows of the first table of a name, by the titles of its columns."""
        head, *rows = self.tables[name][0]
        return [dict(zip(head, row, strict=True)) for row in rows]
