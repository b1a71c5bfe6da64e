"""The memory model: its terms by hand, how they grow, and how measured peaks correct it."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.roles import (
    ACTOR_GENERATE,
    ACTOR_SCORE,
    ACTOR_TRAIN,
    CRITIC_SCORE,
    ModelStage,
    Role,
    Stage,
)
from nereus_jax.planning.candidates import Candidates
from nereus_jax.planning.memory import MemoryModel, StageMemory
from nereus_jax.planning.memory_coefficients import COEFFICIENTS
from nereus_jax.planning.memory_terms import EngineOptions, Terms
from nereus_jax.planning.workload import LengthHistogram, Workload

MODEL = DecoderConfig(
    num_layers=4,
    embed_dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_dim=128,
    vocab_size=1000,
    tie_embeddings=False,
)
WORKLOAD = Workload(
    prompts=16,
    prompt_lengths=LengthHistogram.constant(24),
    response_lengths=LengthHistogram.constant(40),
    max_response_tokens=40,
    minibatch_size=16,
)
CPU = MemoryModel(coefficients=COEFFICIENTS["cpu"])


def candidate(**changes: int) -> Candidates:
    """One microbatch of two rows of 64 tokens on one device, unless changed."""
    values = {"dp": 1, "pp": 1, "tp": 1, "microbatch_size": 2, "microbatches": 1, "accumulation": 8}
    values |= {k: v for k, v in changes.items() if k in values}
    flags = {"remat": bool(changes.get("remat")), "zero1": bool(changes.get("zero1"))}
    return Candidates(
        **{k: np.array([v], np.int64) for k, v in values.items()},
        **{k: np.array([v]) for k, v in flags.items()},
    )


def memory(
    stage: ModelStage = ACTOR_TRAIN,
    *,
    workload: Workload = WORKLOAD,
    memory_model: MemoryModel = CPU,
    cut: Candidates | None = None,
) -> StageMemory:
    head = Head.SCALAR if stage.role in (Role.CRITIC, Role.REWARD) else Head.LM
    return memory_model.stage_memory(
        MODEL, head, stage, workload, cut or candidate(), compute_dtype="float32"
    )


def terms(dtype: str = "float32", **changes: int) -> Terms:
    return Terms(
        model=MODEL,
        workload=WORKLOAD,
        candidates=candidate(**changes),
        param_dtype="float32",
        compute_dtype=dtype,
        options=EngineOptions(),
    )


def test_what_a_layer_keeps_by_hand():
    """128 tokens; 11 arrays of D, 6 of F, 3 of the queries (input and output of attention, its
    flat form is the second), 2 of the keys, 2 of scores."""
    tokens, embed, mlp, queries, keys, scores = 128, 64, 128, 64, 32, 2 * 4 * 64 * 64
    elements = tokens * (11 * embed + 6 * mlp + 2 * queries + 2 * keys) + 2 * scores
    assert terms().kept_by_layer[0] == 4 * elements


def test_in_bfloat16_norms_and_exponentials_stay_wide():
    tokens, embed, mlp, queries, keys, scores = 128, 64, 128, 64, 32, 2 * 4 * 64 * 64
    narrow = tokens * (5 * embed + 6 * mlp + 2 * queries + 2 * keys) + scores
    assert terms("bfloat16").kept_by_layer[0] == 4 * (tokens * 6 * embed + scores) + 2 * narrow


def test_recomputation_keeps_one_array_a_layer():
    assert terms(remat=1).kept[0] == 4 * 4 * 128 * 64
    assert terms().kept[0] == 4 * terms().kept_by_layer[0]


def test_a_pipeline_keeps_what_all_ticks_keep():
    """3 microbatches and 2 ranks: 4 ticks, of 2 layers each."""
    piped = terms(pp=2, microbatches=3, remat=1)
    assert piped.kept[0] == 4 * 2 * 4 * 128 * 64
    assert piped.kept_in_a_tick[0] == 2 * 4 * 128 * 64


def test_arguments_by_hand():
    """8 flushes of 128 tokens: tokens, positions, segments, index, and 3 arrays of the objective;
    how many microbatches there are. One chunk of logits needs no count of the wanted tokens."""
    assert memory().inputs[0] == 8 * 128 * 4 * 7 + 4
    assert memory(ACTOR_SCORE).inputs[0] == 8 * 128 * 4 * 4 + 4
    assert memory(ACTOR_SCORE).results[0] == 2 * 8 * 128 * 4
    assert memory(CRITIC_SCORE).results[0] == 8 * 128 * 4


def test_the_cache_by_hand():
    """16 rows of 64 positions, 4 layers, keys and values of 2 heads of 16."""
    at = memory(ACTOR_GENERATE, cut=candidate(microbatch_size=16)).kv_cache[0]
    assert at == 16 * 64 * 4 * 2 * 2 * 16 * 4


@pytest.mark.parametrize(
    "less",
    [
        {"remat": 1},
        {"tp": 2},
        {"tp": 4},
        {"pp": 2},
        {"microbatch_size": 1, "accumulation": 16},
        {"dp": 2, "zero1": 1},
    ],
    ids=str,
)
def test_every_lever_saves_memory(less: dict[str, int]):
    base = memory()
    saved = memory(cut=candidate(**less))
    assert (saved.held_bytes + saved.working_bytes)[0] < (base.held_bytes + base.working_bytes)[0]


def test_tp_above_the_key_heads_shares_their_cache():
    """2 key heads: tp = 4 holds as much of the cache as tp = 2."""
    two, four = (
        memory(ACTOR_GENERATE, cut=candidate(microbatch_size=16, tp=t)).kv_cache[0] for t in (2, 4)
    )
    assert two == four == memory(ACTOR_GENERATE, cut=candidate(microbatch_size=16)).kv_cache[0] / 2


def with_options(**changes: Any) -> MemoryModel:
    return dataclasses.replace(CPU, options=EngineOptions(**changes))


def test_a_cache_in_pages_is_its_pool():
    """300 positions are 18 pages of 16; 4 layers, 2 heads of 16, keys and values, float32."""
    cut = candidate(microbatch_size=16)
    paged = memory(
        ACTOR_GENERATE,
        memory_model=with_options(kv_cache_tokens=300, kv_page_tokens=16),
        cut=cut,
    )
    assert paged.kv_cache[0] == 18 * 16 * 4 * 2 * 2 * 16 * 4
    whole = memory(ACTOR_GENERATE, cut=cut)
    enough = memory(
        ACTOR_GENERATE,
        memory_model=with_options(kv_cache_tokens=16 * 64, kv_page_tokens=16),
        cut=cut,
    )
    assert enough.at(0) == whole.at(0), "with room for every slot's longest row there are no pages"


def test_layers_without_a_loop_take_a_second_set_of_weights():
    layers = MODEL.layer_params() * MODEL.num_layers * 4
    looped = memory(ACTOR_GENERATE, cut=candidate(microbatch_size=16))
    unrolled = memory(
        ACTOR_GENERATE,
        memory_model=with_options(unrolled_generate=True),
        cut=candidate(microbatch_size=16),
    )
    one = COEFFICIENTS["cpu"].generate.layer_weights * layers / MODEL.num_layers
    assert unrolled.activations[0] - looped.activations[0] == pytest.approx(layers - one)
    more = memory(memory_model=with_options(unrolled_train=True)).gradients[0]
    assert more - memory().gradients[0] == pytest.approx(2 * layers), "and of gradients"


def test_more_prompts_at_a_time_work_with_more():
    def work(prefill_rows: int) -> float:
        found = memory(
            ACTOR_GENERATE,
            memory_model=with_options(prefill_rows=prefill_rows),
            cut=candidate(microbatch_size=16),
        )
        return float(found.activations[0])

    assert work(2) < work(8) <= work(16) == work(64)


def test_long_rows_cost_more_than_in_proportion_until_attention_goes_in_blocks():
    def kept(length: int) -> float:
        longer = dataclasses.replace(
            WORKLOAD,
            response_lengths=LengthHistogram.constant(length - 24),
            max_response_tokens=length - 24,
        )
        return float(memory(workload=longer).activations[0])

    assert kept(512) > 2.2 * kept(256)
    assert kept(2048) < 2.2 * kept(1024)


def test_a_peak_above_the_model_counts_at_once_one_below_half_way():
    before = memory().temporary_bytes[0]
    raised = CPU.corrected(Stage.TRAIN, before, 1.5 * before)
    assert memory(memory_model=raised).temporary_bytes[0] == pytest.approx(1.5 * before)
    lowered = CPU.corrected(Stage.TRAIN, before, 0.25 * before)
    assert memory(memory_model=lowered).temporary_bytes[0] == pytest.approx(0.5 * before)
    other = memory(ACTOR_SCORE, memory_model=raised).temporary_bytes[0]
    assert other == memory(ACTOR_SCORE).temporary_bytes[0], "of another stage"
    assert memory(memory_model=raised).held_bytes[0] == memory().held_bytes[0], "state is exact"


def test_a_weight_edge_needs_its_buffers_where_programs_need_less():
    small = memory(ACTOR_SCORE)
    end = small.with_edge()
    assert end.buffers[0] == max(0.0, small.parameters[0] - small.working_bytes[0])
    assert end.working_bytes[0] == max(small.working_bytes[0], small.parameters[0])
    assert end.temporary_bytes[0] == small.temporary_bytes[0]


def test_kinds_add_up():
    found = memory()
    kinds = found.at(0)
    assert set(kinds) == {"parameters", "optimizer", "inputs", "gradients", "activations"} | (
        {"logits"} if found.logits[0] else set()
    )
    assert sum(kinds.values()) == pytest.approx((found.held_bytes + found.working_bytes)[0])
