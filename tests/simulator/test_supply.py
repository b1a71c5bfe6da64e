"""Traces of spot markets are read, cut and joined; what is wrong with one is said by line."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.core.errors import ConfigError
from nereus_jax.simulator.supply import Supply, constant_supply, read_supply

COUNTS = {"metadata": {"gap_seconds": 300}, "data": [0, 0, 4, 4, 16, 3]}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_counts_are_read(tmp_path: Path) -> None:
    supply = read_supply(write(tmp_path / "counts.json", json.dumps(COUNTS)))
    assert supply.times_s == (0.0, 600.0, 1200.0, 1500.0)
    assert supply.nodes == (0, 4, 16, 3)
    assert supply.end_s == 1800.0 and supply.most == 16
    assert [supply.at(t) for t in (0, 599, 600, 1499, 1500, 9999)] == [0, 0, 4, 16, 3, 3]


def test_events_are_read(tmp_path: Path) -> None:
    lines = "0,add,a\n0,add,b\n5000,add,c\n7000,remove,a\n7000,remove,b\n"
    supply = read_supply(write(tmp_path / "events.csv", lines))
    assert supply.times_s == (0.0, 5.0, 7.0)
    assert supply.nodes == (2, 3, 1)


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("a.csv", "0,add,a\n1,gone,b\n", "line 2: '1,gone,b': is no event"),
        ("a.csv", "time,change,node\n", "line 1"),
        ("a.csv", "0,add,a\n9,add,b\n5,remove,a\n", "line 3: '5,remove,a': comes after 9 ms"),
        ("a.csv", "0,add,a\n9,add,a\n", "line 2: '9,add,a': node a is there already"),
        ("a.csv", "0,remove,a\n", "line 1: '0,remove,a': node a is not there"),
        ("a.json", '{"data": [1]}', "line 1"),
        ("a.json", '{"metadata": {"gap_seconds": 300},\n "data": [1,}', "line 2"),
        ("a.json", '{"metadata": {"gap_seconds": 300}, "data": [1, -2]}', "got [-2]"),
        ("a.json", '{"metadata": {"gap_seconds": 0}, "data": [1]}', "gap_seconds > 0"),
        ("a.json", "\n", "is empty"),
    ],
)
def test_another_format_is_refused_with_its_line(
    tmp_path: Path, name: str, text: str, where: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read_supply(write(tmp_path / name, text))
    assert where in str(error.value)
    assert "known formats are JSON with counts" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_supply(tmp_path / "none.json")


def test_cut_scale_stretch_and_join() -> None:
    supply = Supply(name="x", times_s=(0.0, 100.0, 200.0), nodes=(16, 7, 12), end_s=300.0)
    cut = supply.cut(50.0, 250.0)
    assert (cut.times_s, cut.nodes, cut.end_s) == ((0.0, 50.0, 150.0), (16, 7, 12), 200.0)
    # 7 of 16 nodes are 1.75 of 4; rounded, as 12 are 3.
    assert supply.scaled(4).nodes == (4, 2, 3)
    assert supply.stretched(30.0).times_s == (0.0, 10.0, 20.0)
    assert supply.at_least(10).nodes == (16, 10, 12)
    joined = cut.then(constant_supply(5, 10.0))
    assert joined.at(199.0) == 12 and joined.at(200.0) == 5 and joined.end_s == 210.0
    for window in ((0.0, 301.0), (200.0, 200.0), (-1.0, 10.0)):
        with pytest.raises(ConfigError, match="window"):
            supply.cut(*window)
    with pytest.raises(ConfigError, match="at least 1"):
        supply.scaled(0)


counts = st.lists(st.integers(0, 40), min_size=1, max_size=30)


@given(counts, st.floats(1.0, 1e4), st.data())
def test_a_window_has_what_the_trace_has(
    nodes: list[int], gap_s: float, data: st.DataObject
) -> None:
    """At every time of a window, as at the same time of the trace."""
    supply = constant_supply(nodes[0], gap_s)
    for count in nodes[1:]:
        supply = supply.then(constant_supply(count, gap_s))
    start = data.draw(st.floats(0.0, 0.9)) * supply.end_s
    stop = start + data.draw(st.floats(0.05, 1.0)) * (supply.end_s - start)
    cut = supply.cut(start, stop)
    for share in (0.0, 0.3, 0.99):
        time_s = share * cut.end_s
        # Sums of floating point may put a change a hair before or after the moment asked for.
        near = {supply.at(start + time_s + d) for d in (-1e-6 * gap_s, 0.0, 1e-6 * gap_s)}
        assert cut.at(time_s) in near
