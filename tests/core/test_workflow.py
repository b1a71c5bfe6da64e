"""The dataflow of the algorithms: what waits for what, and what a workflow refuses."""

import itertools

import pytest

from nereus_jax.core.roles import (
    ACTOR_GENERATE,
    ACTOR_SCORE,
    ACTOR_TRAIN,
    CRITIC_SCORE,
    CRITIC_TRAIN,
    REFERENCE_SCORE,
    REWARD_SCORE,
)
from nereus_jax.core.workflow import (
    ALGORITHMS,
    HostCall,
    StageCall,
    WeightEdge,
    Workflow,
    policy_gradient,
)

VARIANTS = list(itertools.product([False, True], repeat=3))


def variant(reward_model: bool, reference: bool, recompute: bool) -> Workflow:
    return of("ppo", reward_model, reference, recompute)


def of(algorithm: str, reward_model: bool, reference: bool, recompute: bool) -> Workflow:
    return policy_gradient(
        algorithm,
        reward_model=reward_model,
        reference=reference,
        recompute_old_logprobs=recompute,
    )


@pytest.mark.parametrize(("reward_model", "reference", "recompute"), VARIANTS)
def test_waves_of_every_variant(reward_model, reference, recompute):
    workflow = variant(reward_model, reference, recompute)
    scores = {"critic-SCORE", "reward-SCORE" if reward_model else "rewards"}
    scores |= {"reference-SCORE"} if reference else set()
    scores |= {"actor-SCORE"} if recompute else set()
    waves = [{call.name for call in wave} for wave in workflow.waves()]
    assert waves == [{"actor-GENERATE"}, scores, {"advantages"}, {"actor-TRAIN", "critic-TRAIN"}]


@pytest.mark.parametrize(("reward_model", "reference", "recompute"), VARIANTS)
def test_optional_stages_and_weight_edges(reward_model, reference, recompute):
    workflow = variant(reward_model, reference, recompute)
    optional = {REWARD_SCORE: reward_model, REFERENCE_SCORE: reference, ACTOR_SCORE: recompute}
    always = {ACTOR_GENERATE, CRITIC_SCORE, ACTOR_TRAIN, CRITIC_TRAIN}
    assert set(workflow.model_stages) == always | {s for s, on in optional.items() if on}
    assert len(set(workflow.model_stages)) == len(workflow.model_stages)
    edges = {(e.source, e.target) for e in workflow.weight_edges}
    trained = {(ACTOR_TRAIN, ACTOR_GENERATE), (CRITIC_TRAIN, CRITIC_SCORE)}
    assert edges == trained | ({(ACTOR_TRAIN, ACTOR_SCORE)} if recompute else set())
    ends = {end for edge in workflow.weight_edges for end in (edge.source, edge.target)}
    assert ends <= set(workflow.model_stages)


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@pytest.mark.parametrize(("reward_model", "reference", "recompute"), VARIANTS)
def test_every_value_has_one_writer_and_is_read_after_it(
    algorithm, reward_model, reference, recompute
):
    workflow = of(algorithm, reward_model, reference, recompute)
    written = [name for call in workflow.calls for name in call.outputs]
    assert len(set(written)) == len(written)
    known = set(workflow.given)
    for wave in workflow.waves():
        names = [call.name for call in wave]
        assert len(set(names)) == len(names)
        for call in wave:
            assert known.issuperset(call.inputs)
        known.update(name for call in wave for name in call.outputs)
    read = {name for call in workflow.calls for name in call.inputs}
    metrics = {"actor_metrics"} | ({"critic_metrics"} if ALGORITHMS[algorithm].critic else set())
    assert set(written) - read == metrics


@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - {"ppo"}))
def test_without_a_critic_none_is_placed_fed_or_trained(algorithm):
    workflow = of(algorithm, False, True, False)
    assert workflow.model_stages == (ACTOR_GENERATE, REFERENCE_SCORE, ACTOR_TRAIN)
    assert workflow.weight_edges == (WeightEdge(source=ACTOR_TRAIN, target=ACTOR_GENERATE),)


def test_the_greedy_baseline_is_generated_beside_the_rollout_and_rewarded_like_it():
    waves = [{c.name for c in wave} for wave in of("remax", True, True, False).waves()]
    assert waves[0] == {"actor-GENERATE", "actor-GENERATE greedy"}
    assert waves[1] == {"reference-SCORE", "reward-SCORE", "reward-SCORE greedy"}
    (batch,) = of("remax", False, False, False).waves()[2]
    assert set(batch.inputs) == {"rollout", "rewards", "greedy_rewards"}


def workflow_of(*calls: HostCall) -> Workflow:
    return Workflow(name="w", given=("a",), calls=calls, weight_edges=())


def call(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> HostCall:
    return HostCall(function=name, inputs=inputs, outputs=outputs)


def test_calls_may_be_listed_in_any_order():
    last, first = call("last", ("b",), ("c",)), call("first", ("a",), ("b",))
    assert workflow_of(last, first).waves() == ((first,), (last,))


def test_an_unmet_input_or_a_circle_is_an_error_at_once():
    with pytest.raises(ValueError, match=r"inputs missing: .*nowhere"):
        workflow_of(call("x", ("nowhere",), ("y",)))
    with pytest.raises(ValueError, match="no call can run"):
        workflow_of(call("x", ("z",), ("y",)), call("z", ("y",), ("z",)))


def test_two_equal_calls_both_run():
    twice = call("x", ("a",), ("b",))
    assert workflow_of(twice, twice).waves() == ((twice, twice),)


def test_stage_calls_are_named_by_their_model_stage():
    stage = StageCall(model_stage=ACTOR_TRAIN, inputs=(), outputs=())
    assert stage.name == "actor-TRAIN"
    assert WeightEdge(source=ACTOR_TRAIN, target=ACTOR_GENERATE).source is ACTOR_TRAIN
