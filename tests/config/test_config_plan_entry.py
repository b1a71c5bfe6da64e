"""Plan entries: their text, and whether a model and a pool can take them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.config import (
    PlanEntry,
    check_plan_against_devices,
    check_plan_against_model,
    parse_plan_entry,
)
from nereus_jax.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dp=2,pp=2,tp=2", PlanEntry(dp=2, pp=2, tp=2)),
        ("tp=4", PlanEntry(tp=4)),
        (" dp = 2 , tp = 1 ", PlanEntry(dp=2)),
        ("dp=2,pp=1,tp=2,devices=0-3", PlanEntry(dp=2, tp=2, devices=(0, 1, 2, 3))),
        ("dp=5,devices=0-2, 5,7", PlanEntry(dp=5, devices=(0, 1, 2, 5, 7))),
        ("dp=1,devices=6", PlanEntry(devices=(6,))),
        ("dp=2,parked", PlanEntry(dp=2, parked=True)),
        ("parked, tp=2,devices=0-1", PlanEntry(tp=2, devices=(0, 1), parked=True)),
    ],
)
def test_text_is_read(text: str, expected: PlanEntry) -> None:
    assert parse_plan_entry(text) == expected


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["names none of dp, pp and tp"]),
        ("devices=0-3", ["names none of dp, pp and tp"]),
        ("dp=2,dp=2", ["dp is given twice"]),
        ("dp=0", ["dp must be an integer >= 1", "'0'"]),
        ("dp=-1", ["dp must be an integer >= 1", "'-1'"]),
        ("dp=two", ["'two'"]),
        ("dp=2,tpp=2", ["'tpp=2'", "did you mean 'tp'?"]),
        ("parked", ["names none of dp, pp and tp"]),
        ("dp=2,park", ["'park' is not", "did you mean 'parked'?"]),
        ("dp=2,2", ["'2' is not one of dp=N"]),
        ("dp=2,device=0-1", ["'device=0-1'", "did you mean 'devices'?"]),
        ("dp=2devices=0-1", ["must follow a comma"]),
        ("devices=0-1,dp=2", ["must come last"]),
        ("dp=2,devices=0,x", ["'x'", "neither a position nor a range"]),
        ("dp=2,devices=", ["neither a position nor a range"]),
        ("dp=2,devices=1-0", ["the range '1-0'", "such as 0-1"]),
        ("dp=2,devices=0-99999999999", ["ascending positions up to 1000000"]),
        ("dp=3,devices=0-1,1", ["names device 1 more than once"]),
        ("dp=3,devices=4,0-1", ["not in ascending order", "devices=0-1,4"]),
        ("dp=2,tp=2,devices=0-2", ["dp*pp*tp = 4", "got 3"]),
        ("dp=2\n,x", ["\\n"]),
    ],
)
def test_bad_text_is_one_line_with_the_model_stage(text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_plan_entry(text, "actor-TRAIN")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("plan.actor-TRAIN=")
    for part in parts:
        assert part in message


def test_an_entry_knows_its_devices() -> None:
    assert PlanEntry(dp=2, tp=2).positions == (0, 1, 2, 3)
    assert PlanEntry(dp=2, devices=(1, 5)).positions == (1, 5)
    assert PlanEntry(dp=2, pp=3, tp=2).num_devices == 12


degrees = st.integers(1, 4)


@st.composite
def entries(draw: st.DrawFn) -> PlanEntry:
    dp, pp, tp = draw(degrees), draw(degrees), draw(degrees)
    parked = draw(st.booleans())
    if draw(st.booleans()):
        return PlanEntry(dp=dp, pp=pp, tp=tp, parked=parked)
    count = dp * pp * tp
    chosen = draw(st.sets(st.integers(0, 2 * count + 5), min_size=count, max_size=count))
    return PlanEntry(dp=dp, pp=pp, tp=tp, devices=tuple(sorted(chosen)), parked=parked)


@given(entries())
def test_round_trip(entry: PlanEntry) -> None:
    assert parse_plan_entry(str(entry)) == entry


@given(st.text(alphabet="dptevics=,-0123 \n", max_size=30))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    message = ""
    try:
        entry = parse_plan_entry(text, "actor-TRAIN")
        assert len(entry.positions) == entry.num_devices
    except ConfigError as error:
        message = str(error)
    assert "\n" not in message


def test_heads_and_layers_bound_the_degrees() -> None:
    check_plan_against_model({"actor-TRAIN": PlanEntry(tp=3, pp=4)}, 9, 4)
    check_plan_against_model({"actor-TRAIN": PlanEntry(pp=40)}, 9)
    with pytest.raises(ConfigError) as caught:
        check_plan_against_model({"critic-TRAIN": PlanEntry(tp=2)}, 9)
    message = "plan.critic-TRAIN: tp=2 does not divide the 9 query heads of the model; "
    assert str(caught.value) == message + "allowed tp: 1, 3, 9"
    with pytest.raises(
        ConfigError, match=r"plan\.actor-TRAIN: pp=5 .* 4 layers; allowed pp: 1 to 4"
    ):
        check_plan_against_model({"actor-TRAIN": PlanEntry(pp=5)}, 8, 4)


@pytest.mark.parametrize(
    ("entry", "num_devices", "parts"),
    [
        (PlanEntry(dp=4, tp=2), 6, ["asks for 8 devices", "pool of 6", "'dp=2,pp=1,tp=2'"]),
        (PlanEntry(dp=2, pp=2, tp=2), 1, ["'dp=1,pp=1,tp=1'", "set emulated_devices"]),
        (PlanEntry(dp=3), 2, ["'dp=1,pp=1,tp=1'"]),
        (PlanEntry(dp=2, devices=(0, 9)), 8, ["names device 9", "allowed positions: 0 to 7"]),
    ],
)
def test_devices_bound_the_plan(entry: PlanEntry, num_devices: int, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_plan_against_devices({"reference-SCORE": entry}, num_devices)
    message = str(caught.value)
    assert "\n" not in message
    for part in ["plan.reference-SCORE", str(entry), *parts]:
        assert part in message


def test_devices_that_suffice_pass() -> None:
    plan = {"actor-TRAIN": PlanEntry(dp=2, tp=2), "critic-TRAIN": PlanEntry(devices=(3,))}
    check_plan_against_devices(plan, 4)
