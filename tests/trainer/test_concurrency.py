"""Model-stages on disjoint devices run at the same time, those on shared devices in turn."""

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.core.timeline import Span
from nereus_jax.report.timeline import read_timeline
from nereus_jax.runtime.dispatch import MAX_IN_FLIGHT, Arrays, Work, lanes, run_wave


def overlap_s(first: Span, second: Span) -> float:
    """Seconds in which both ran; negative: the gap between them."""
    return min(first.end_s, second.end_s) - max(first.start_s, second.start_s)


def spans_by_step(workdir: Path, *names: str) -> list[list[Span]]:
    """The spans of these model-stages, step by step."""
    spans = read_timeline(workdir / "timeline.jsonl")
    steps = sorted({s.step for s in spans})
    return [[next(s for s in spans if s.step == i and s.name == n) for n in names] for i in steps]


# Programs that take a moment: what a tiny model does has ended before the next one is launched.
LARGER = (
    "num_steps=2",
    "model.embed_dim=256",
    "model.mlp_dim=1024",
    "rollout.batch_size=64",
    "algorithm.minibatch_size=32",
    "train.microbatch_size=16",
)
PAIRS = (("reference-SCORE", "critic-SCORE"), ("actor-TRAIN", "critic-TRAIN"))


@pytest.mark.slow
def test_disjoint_devices_overlap(nereus: Any, tmp_path: Path) -> None:
    child = nereus.run(tmp_path, *LARGER)
    assert child.process.returncode == 0, child.stderr
    for names in PAIRS:
        steps = spans_by_step(tmp_path, *names)
        assert not set(steps[0][0].devices) & set(steps[0][1].devices)
        assert max(overlap_s(*spans) for spans in steps) > 0


@pytest.mark.slow
def test_shared_devices_take_turns(nereus: Any, tmp_path: Path) -> None:
    child = nereus.run(
        tmp_path,
        *LARGER,
        "plan.actor-TRAIN=dp=2,pp=1,tp=1",
        "plan.critic-TRAIN=dp=2,pp=1,tp=1,devices=1-2",
        "plan.actor-GENERATE=dp=2,pp=1,tp=1",
        "plan.reference-SCORE=dp=2,pp=1,tp=1",
        "plan.critic-SCORE=dp=2,pp=1,tp=1,devices=1-2",
    )
    assert child.process.returncode == 0, child.stderr
    for names in PAIRS:
        assert all(overlap_s(*spans) <= 0 for spans in spans_by_step(tmp_path, *names))


def work(name: str, devices: str, *launches: Callable[[], Arrays]) -> Work:
    return Work(name=name, devices=tuple(devices), launches=launches)


def test_lanes_join_works_that_share_a_device() -> None:
    works = [work("a", "01"), work("b", "23"), work("c", "12"), work("d", "4")]
    assert [[w.name for w in lane] for lane in lanes(works)] == [["a", "b", "c"], ["d"]]
    assert lanes([]) == []


@given(st.lists(st.sets(st.sampled_from("0123456789"), min_size=1, max_size=4), max_size=8))
def test_lanes_are_the_finest_split(sets: list[set[str]]) -> None:
    works = [work(str(i), "".join(sorted(s))) for i, s in enumerate(sets)]
    found = lanes(works)
    assert sorted((w.name for lane in found for w in lane), key=int) == [w.name for w in works]
    used = [{d for w in lane for d in w.devices} for lane in found]
    for first, second in itertools.combinations(used, 2):
        assert not first & second
    for lane in found:
        assert [int(w.name) for w in lane] == sorted(int(w.name) for w in lane)
        reached = set(lane[0].devices)  # every work is connected to the first one
        for _ in lane:
            reached |= {d for w in lane if reached & set(w.devices) for d in w.devices}
        assert all(reached & set(w.devices) for w in lane)


def test_a_wave_launches_lanes_in_turn_and_keeps_the_order_in_each() -> None:
    log: list[str] = []

    def launches(name: str, count: int) -> list[Callable[[], Arrays]]:
        def launch(i: int) -> Arrays:
            log.append(f"{name}{i}")
            return {"x": jnp.full((), i)}

        return [lambda i=i: launch(i) for i in range(count)]

    works = [
        work("a", "0", *launches("a", 2)),
        work("b", "0", *launches("b", 1)),
        work("c", "1", *launches("c", 3)),
    ]
    finished = run_wave(works, 7, lambda: log.append("host"))
    assert log == ["a0", "c0", "a1", "c1", "b0", "c2", "host"]
    assert {name: [int(x["x"]) for x in f.arrays] for name, f in finished.items()} == {
        "a": [0, 1],
        "b": [0],
        "c": [0, 1, 2],
    }
    spans = {name: f.span for name, f in finished.items()}
    assert spans["b"].start_s >= spans["a"].end_s  # launched behind it on the same device
    assert spans["a"].step == 7 and spans["a"].devices == ("0",)


def slow_program(device: Any) -> Callable[[], Arrays]:
    """A program that runs for some tenths of a second."""

    def run(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3000, lambda _, y: jnp.tanh(y @ y), x)

    argument = jax.device_put(jnp.full((64, 64), 0.01), device)
    compiled = jax.jit(run).lower(argument).compile()
    return lambda: {"x": compiled(argument)}


def test_programs_on_two_devices_run_at_the_same_time() -> None:
    devices = jax.devices("cpu")
    works = [work(str(i), str(i), slow_program(devices[i])) for i in (2, 3)]
    host_s: list[float] = []
    finished = run_wave(works, 0, lambda: host_s.append(time.time()))
    first, second = finished["2"].span, finished["3"].span
    assert overlap_s(first, second) > 0
    assert host_s[0] < min(first.end_s, second.end_s)  # the host does not wait for the devices


def test_never_more_programs_in_flight_than_the_limit() -> None:
    waited: list[int] = []

    launched = 0

    def launch() -> Arrays:
        nonlocal launched
        launched += 1
        return {"x": jnp.zeros(())}

    original = jax.block_until_ready

    def watch(value: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            waited.append(launched)
        return original(value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "block_until_ready", watch)
        run_wave([work("a", "0", *[launch] * (MAX_IN_FLIGHT + 3))], 0)
    assert waited == [MAX_IN_FLIGHT, MAX_IN_FLIGHT + 1, MAX_IN_FLIGHT + 2]


def test_an_empty_wave_still_does_the_hosts_work() -> None:
    done: list[bool] = []
    assert run_wave([], 0, lambda: done.append(True)) == {}
    assert done == [True]


def test_what_a_launch_raises_is_raised() -> None:
    def launch() -> Arrays:
        raise ValueError("no such program")

    with pytest.raises(ValueError, match="no such program"):
        run_wave([work("a", "0", launch)], 0)
