"""Placements and plans: which devices, the round trip through JSON, and what is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus_jax.core.architectures import DecoderConfig
from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.roles import ACTOR_GENERATE, ACTOR_TRAIN, ModelStage, Role, Stage

POOL = DevicePool.uniform(2, 4)


def place(dp: int, pp: int, tp: int, *positions: int) -> Placement:
    layout = ParallelLayout(dp, pp, tp)
    chosen = positions or range(layout.num_devices)
    return Placement(layout=layout, devices=tuple(POOL.devices[i] for i in chosen))


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    dp, pp, tp = (draw(st.integers(1, 2)) for _ in range(3))
    order = draw(st.permutations(range(len(POOL))))
    return place(dp, pp, tp, *order[: dp * pp * tp])


model_stages = st.builds(ModelStage, st.sampled_from(Role), st.sampled_from(Stage))


@given(st.dictionaries(model_stages, placements()))
def test_json_round_trip(chosen):
    plan = Plan(placements=chosen)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    plan.check_pool(POOL)


def test_json_is_readable_and_sorted():
    plan = Plan(placements={ACTOR_TRAIN: place(1, 2, 1, 5, 0), ACTOR_GENERATE: place(1, 1, 1)})
    assert list(plan.to_json()) == ["actor-GENERATE", "actor-TRAIN"]
    assert plan.to_json()["actor-TRAIN"] == {"dp": 1, "pp": 2, "tp": 1, "devices": ["1:1", "0:0"]}
    assert ACTOR_TRAIN in plan
    assert plan[ACTOR_TRAIN].layout.pp == 2
    assert ModelStage(Role.CRITIC, Stage.TRAIN) not in plan


@given(placements())
def test_replicas_partition_the_devices(placement):
    layout = placement.layout
    replicas = [placement.replica_devices(d) for d in range(layout.dp)]
    assert sum(replicas, ()) == placement.devices
    assert {len(r) for r in replicas} == {layout.pp * layout.tp}


def test_overlap():
    assert place(1, 2, 1, 0, 3).overlaps(place(1, 1, 1, 3))
    assert not place(1, 2, 1, 0, 3).overlaps(place(1, 2, 1, 1, 2))


def test_wrong_placements_are_refused():
    with pytest.raises(InfeasiblePlanError, match="dp=2,pp=1,tp=2 needs 4 devices, got 3"):
        place(2, 1, 2, 0, 1, 2)
    with pytest.raises(InfeasiblePlanError, match="listed twice"):
        place(1, 1, 2, 1, 1)


def test_devices_outside_the_pool_are_named():
    plan = Plan(placements={ACTOR_TRAIN: place(1, 1, 2, 3, 4)})
    with pytest.raises(InfeasiblePlanError, match=r"actor-TRAIN is placed on 1:0, which the pool"):
        plan.check_pool(POOL.without([DeviceId(1, 0)]))


GOOD: dict[str, object] = {"dp": 1, "pp": 1, "tp": 1, "devices": ["0:0"]}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"dp": "1"}, "must be integers"),
        ({"dp": 1.0}, "must be integers"),
        ({"dp": True}, "dp must be a positive integer"),
        ({"tp": 0}, "tp must be a positive integer"),
        ({"tp": 2}, "needs 2 devices"),
        ({"devices": "0:0"}, "a list"),
        ({"devices": ["0"]}, "host:index"),
        ({"devices": [0]}, "host:index"),
        ({"devices": None}, "a list"),
    ],
)
def test_wrong_json_entries_name_the_model_stage(change, complaint):
    with pytest.raises(InfeasiblePlanError, match=complaint) as caught:
        Plan.from_json({"actor-TRAIN": {**GOOD, **change}})
    assert "plan entry 'actor-TRAIN'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", GOOD)
def test_missing_keys_name_the_model_stage(missing):
    entry = {name: value for name, value in GOOD.items() if name != missing}
    with pytest.raises(InfeasiblePlanError, match=f"'actor-TRAIN'.*'{missing}' is missing"):
        Plan.from_json({"actor-TRAIN": entry})


@pytest.mark.parametrize("entry", [None, 3, "dp=1", ["dp"]])
def test_an_entry_that_is_no_object_is_refused(entry):
    with pytest.raises(InfeasiblePlanError, match="'actor-TRAIN' is not a placement"):
        Plan.from_json({"actor-TRAIN": entry})


@pytest.mark.parametrize("name", ["actor", "actor-FLY", "poet-TRAIN", "", "actor-TRAIN-x"])
def test_unknown_model_stages_are_refused(name):
    with pytest.raises(InfeasiblePlanError, match="unknown model-stage"):
        Plan.from_json({name: GOOD})


def test_a_tensor_parallel_degree_that_cuts_query_heads_is_refused() -> None:
    model = DecoderConfig(
        num_layers=2,
        embed_dim=8,
        num_heads=6,
        num_kv_heads=2,
        head_dim=4,
        mlp_dim=8,
        vocab_size=11,
    )
    model.check_layout(ParallelLayout(dp=2, pp=3, tp=6))
    with pytest.raises(InfeasiblePlanError, match=r"tp=4 .* 6 query heads .* \[1, 2, 3, 6\]"):
        model.check_layout(ParallelLayout(tp=4))
