"""Pool traces: what they say, and which line is wrong."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.control.pool_trace import (
    PoolChange,
    PoolReader,
    PoolTrace,
    TraceEvent,
    parse_pool_trace,
    read_pool_trace,
)
from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.errors import ConfigError
from nereus_jax.core.events import DevicesJoined, DevicesLost, Revocation

POOL = DevicePool.uniform(2, 4)


def lines(*entries: object) -> str:
    return "\n".join(json.dumps(e) for e in entries)


def names(event) -> list[str]:
    return [str(d) for d in event.devices]


def told(trace: PoolTrace) -> list[tuple[float, str, list[str]]]:
    return [(e.at, e.change.value, names(e)) for e in trace.events]


def test_names_ranges_and_numbers():
    trace = parse_pool_trace(
        lines(
            {"step": 3, "event": "lost", "devices": ["0:3"]},
            {"step": 5, "event": "lost", "devices": 2},
            {"step": 5, "event": "joined", "devices": ["1:2-3"]},
            {"step": 9, "event": "joined", "devices": 1},
            {"step": 9, "event": "revoke", "devices": ["1:0-1"], "deadline_s": 120},
        ),
        POOL,
    )
    assert trace.clock == "step"
    assert told(trace) == [
        (3, "lost", ["0:3"]),
        (5, "lost", ["1:2", "1:3"]),  # the last ones
        (5, "joined", ["1:2", "1:3"]),
        (9, "joined", ["0:3"]),  # the first one that is missing
        (9, "revoke", ["1:0", "1:1"]),
    ]
    assert trace.events[-1].deadline_s == 120.0


def test_a_pool_by_its_size_or_its_members():
    trace = parse_pool_trace(
        json.dumps(
            [
                {"time_s": 0, "devices": 6},
                {"time_s": 300.0, "devices": 8},
                {"time_s": 600.0, "devices": ["0:0", "1:0-3"]},
                {"time_s": 900.0, "devices": ["0:0", "1:0-3"]},
                {"time_s": 900.0, "devices": 0},
            ]
        ),
        POOL,
    )
    assert trace.clock == "time_s"
    assert told(trace) == [
        (0.0, "lost", ["1:2", "1:3"]),
        (300.0, "joined", ["1:2", "1:3"]),
        (600.0, "lost", ["0:1", "0:2", "0:3"]),
        (900.0, "lost", ["0:0", "1:0", "1:1", "1:2", "1:3"]),
    ]


def test_entries_become_events():
    trace = parse_pool_trace(
        lines(
            {"step": 1, "event": "revoke", "devices": ["0:0"], "deadline_s": 30},
            {"step": 2, "event": "lost", "devices": ["0:0"]},
            {"step": 3, "event": "joined", "devices": ["0:0"]},
        ),
        POOL,
    )
    device = (DeviceId(0, 0),)
    assert [e.event(7.0) for e in trace.events] == [
        Revocation(time_s=7.0, devices=device, deadline_s=30.0),
        DevicesLost(time_s=7.0, devices=device),
        DevicesJoined(time_s=7.0, devices=device),
    ]


def test_revoked_devices_are_gone_when_their_time_is_over():
    revoked = {"time_s": 10, "event": "revoke", "devices": ["0:0"], "deadline_s": 30}
    before = {"time_s": 39, "event": "lost", "devices": ["0:0"]}
    assert len(parse_pool_trace(lines(revoked, before), POOL).events) == 2
    with pytest.raises(ConfigError, match="0:0 is not there and cannot be lost"):
        parse_pool_trace(lines(revoked, {**before, "time_s": 40}), POOL)
    joined = {"time_s": 41, "event": "joined", "devices": ["0:0"]}
    assert len(parse_pool_trace(lines(revoked, joined), POOL).events) == 2
    back = {"time_s": 20, "event": "joined", "devices": ["0:0"]}  # the notice is taken back
    assert len(parse_pool_trace(lines(revoked, back), POOL).events) == 2


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            [{"step": 5, "devices": 8}, {"step": 4, "devices": 7}],
            "line 2: step 4 comes after 5: time cannot run backwards",
        ),
        (
            [{"step": 1, "devices": 9}],
            "line 1: devices must be 0 to 8, as many as exist, got 9",
        ),
        (
            [{"step": 1, "event": "lost", "devices": 9}],
            "line 1: devices must be 1 to 8, as many as are there, got 9",
        ),
        (
            [{"step": 1, "event": "joined", "devices": 1}],
            "line 1: devices must be 1 to 0, as many as are missing, got 1",
        ),
        (
            [{"step": 1, "event": "lost", "devices": ["2:0"]}],
            "line 1: device 2:0 does not exist; the job has 8 devices from 0:0 to 1:3",
        ),
        (
            [
                {"step": 1, "event": "lost", "devices": ["0:1"]},
                {"step": 2, "event": "revoke", "devices": ["0:1"], "deadline_s": 3},
            ],
            "line 2: device 0:1 is not there and cannot be revoked",
        ),
        (
            [{"step": 1, "event": "joined", "devices": ["0:1"]}],
            "line 1: device 0:1 is there already and cannot join",
        ),
        (
            [{"step": 1, "device": 4}],
            "line 1: key 'device' is not known; known are step, time_s, devices, event, deadline_s",
        ),
        ([{"step": 1}], "line 1: devices is missing"),
        ([{"devices": 4}], "line 1: needs step or time_s and not both"),
        ([{"step": 1, "time_s": 2, "devices": 4}], "needs step or time_s and not both"),
        (
            [{"step": 1, "devices": 4}, {"time_s": 2, "devices": 8}],
            "line 2: has time_s, the lines before it have step",
        ),
        ([{"step": 1.5, "devices": 4}], "step must be a whole number, got 1.5"),
        ([{"step": True, "devices": 4}], "step must be a whole number, got True"),
        ([{"time_s": "noon", "devices": 4}], "time_s must be a number, got 'noon'"),
        ([{"step": -1, "devices": 4}], "step must be at least 0, got -1"),
        ([{"step": 1, "event": "gone", "devices": 4}], "event 'gone' is not known; known are lost"),
        ([{"step": 1, "event": "revoke", "devices": 4}], "deadline_s is missing"),
        (
            [{"step": 1, "event": "lost", "devices": 4, "deadline_s": 2}],
            "deadline_s does not belong to it",
        ),
        ([{"step": 1, "devices": 4, "deadline_s": 2}], "deadline_s needs the event revoke"),
        (
            [{"step": 1, "event": "revoke", "devices": 4, "deadline_s": -2}],
            "deadline_s must be a number of at least 0, got -2",
        ),
        ([{"step": 1, "devices": ["gpu3"]}], "written host:index or host:first-last, got 'gpu3'"),
        ([{"step": 1, "devices": []}], "must be a number or a list of names"),
        ([{"step": 1, "devices": ["0:0", "0:0-1"]}], "device 0:0 is named more than once"),
        ([{"step": 1, "devices": ["0:0-99999999999"]}], "a range ascends and has up to"),
        ([{"step": 1, "devices": ["0:3-1"]}], "a range ascends"),
        (["lost"], "line 1: must be an object, got 'lost'"),
    ],
)
def test_mistakes_name_the_line(entries, message):
    with pytest.raises(ConfigError) as caught:
        parse_pool_trace(lines(*entries), POOL)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_broken_text_names_the_place():
    with pytest.raises(ConfigError, match="line 3: is no JSON"):
        parse_pool_trace('{"step": 1, "devices": 4}\n\n{"step": 2,', POOL)
    with pytest.raises(ConfigError, match="is no JSON list"):
        parse_pool_trace("[1, ", POOL)
    with pytest.raises(ConfigError, match="entry 2: step 0 comes after 1"):
        parse_pool_trace('[{"step": 1, "devices": 4}, {"step": 0, "devices": 4}]', POOL)


def test_messages_are_of_now_and_follow_each_other():
    reader = PoolReader(POOL, DevicePool(devices=POOL.devices[:6]), leaving=[DeviceId(0, 1)])
    revoke = reader.message({"change": "revoke", "devices": ["0:2-3"], "deadline_s": 60})
    assert (revoke.change, names(revoke), revoke.deadline_s) == (
        PoolChange.REVOKE,
        ["0:2", "0:3"],
        60.0,
    )
    assert names(reader.message({"change": "lost", "devices": ["0:2"]})) == ["0:2"]
    assert names(reader.message({"change": "joined", "devices": 3})) == ["0:1", "0:2", "0:3"]
    with pytest.raises(ValueError, match="0:2 is there already and cannot join"):
        reader.message({"change": "joined", "devices": ["0:2"]})
    reader.follow(TraceEvent(at=0.0, change=PoolChange.LOST, devices=(DeviceId(0, 0),)))
    with pytest.raises(ValueError, match="0:0 is not there and cannot be revoked"):
        reader.message({"change": "revoke", "devices": ["0:0"], "deadline_s": 1})


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ([], "must be an object"),
        ({"devices": ["0:0"]}, "change None is not known; known are lost, joined, revoke"),
        ({"change": ["lost"], "devices": ["0:0"]}, "change ['lost'] is not known"),
        ({"change": "lost"}, "devices is missing"),
        ({"change": "lost", "devices": ["9:0"]}, "device 9:0 does not exist"),
        ({"change": "lost", "devices": ["0:0"], "step": 3}, "key 'step' is not known"),
        ({"change": "revoke", "devices": ["0:0"]}, "deadline_s is missing"),
        (
            {"change": "lost", "devices": ["0:0-40000", "1:0-40000"]},
            "an entry names up to 65536 devices",
        ),
    ],
)
def test_a_wrong_message_changes_nothing(message, reason):
    reader = PoolReader(POOL, POOL)
    with pytest.raises(ValueError) as caught:
        reader.message(message)
    assert reason in str(caught.value)
    assert len(reader.message({"change": "lost", "devices": 8}).devices) == 8


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 12)
    | st.floats()
    | st.sampled_from(["0:1", "1:0-3", "0:3-1", "lost", "joined", "revoke", "0:0-70000"]),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(["change", "devices", "deadline_s", "event"]), VALUES))
def test_any_message_is_a_change_or_a_reason(message):
    reader = PoolReader(POOL, DevicePool(devices=POOL.devices[:6]), leaving=[DeviceId(0, 1)])
    try:
        event = reader.message(message)
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert event.devices and set(event.devices) <= set(POOL.devices)
        assert math.isfinite(event.deadline_s) and event.deadline_s >= 0


def test_a_change_is_the_same_when_it_is_read_again():
    event = PoolReader(POOL, POOL).message(
        {"change": "revoke", "devices": ["1:1"], "deadline_s": 2.5}
    )
    assert TraceEvent.from_json(json.loads(json.dumps(event.to_json()))) == event


def test_files(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(lines({"step": 1, "event": "lost", "devices": 1}) + "\n")
    start = DevicePool(devices=POOL.devices[:3])
    (event,) = read_pool_trace(path, POOL, start).events
    assert names(event) == ["0:2"] and event.change is PoolChange.LOST
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_pool_trace(tmp_path / "none.jsonl", POOL)
    path.write_text("")
    assert read_pool_trace(path, POOL) == PoolTrace(clock="step", events=())
