# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""Bytes of the GENERATE program: the KV cache, and what prefill and a decode step work with."""

import numpy as np

from nereus_jax.core.layout import KV
from nereus_jax.planning.candidates import PREFILL_ROWS, Ints
from nereus_jax.planning.memory_coefficients import Coefficients
from nereus_jax.planning.memory_state import Floats, floats
from nereus_jax.planning.memory_terms import (
    FLOAT_BYTES,
    MANY_SOFTMAXES,
    QUERY_BLOCK,
    Terms,
)

ROW_NUMBERS = 4
"""Of a row beside its prompt: length, sample, limit, place."""
RESPONSE_BYTES = 8
"""Of a token: itself and its log-probability."""
ROW_RESULT_BYTES = 5
"""Of a row beside its tokens: length, and whether it ended."""


def decode_bytes(terms: Terms, coefficients: Coefficients) -> dict[str, Floats]:
    """Bytes by kind, [C] each."""
    c, candidates, model = coefficients.generate, terms.candidates, terms.model
    slots, item = candidates.microbatch_size, terms.item
    # Keys and values of one position in one layer.
    position = 2 * (model.num_kv_heads // terms.degrees[KV]) * model.head_dim * item
    cache = floats(slots * terms.layers * terms.span * position)
    group = -(-slots // candidates.pp)
    step = c.cache_read * group * terms.span * position
    step = step + c.logits * group * terms.vocab_rows * FLOAT_BYTES
    work = np.maximum(_prefill_bytes(terms, coefficients, position), step)
    rows = np.maximum(-(-terms.workload.rows // candidates.dp), slots)
    waiting = rows > slots  # the branch that fills free slots copies the cache on GPUs
    tokens = terms.workload.max_response_tokens
    responses = floats(rows * tokens * RESPONSE_BYTES)
    return {
        "inputs": floats(4 * rows * (terms.workload.prompt_width + ROW_NUMBERS) + 4),
        "results": responses + rows * ROW_RESULT_BYTES,
        "kv_cache": cache * np.where(waiting, 1.0 + c.refilled_cache, 1.0),
        "activations": c.layer_weights * terms.layer_weight_bytes
        + work
        + c.responses * responses * candidates.dp,
    }


def _prefill_bytes(terms: Terms, coefficients: Coefficients, position: Ints) -> Floats:
    """What a microbatch of prompts works with."""
    c, model, candidates = coefficients.generate, terms.model, terms.candidates
    rows = np.ones_like(candidates.microbatch_size)
    for size in range(2, PREFILL_ROWS + 1):  # the largest divisor of the slots
        rows = np.where(candidates.microbatch_size % size == 0, size, rows)
    width = terms.workload.prompt_width
    stream = floats(rows * width * model.embed_dim * terms.item)
    softmaxes = rows * terms.heads * min(width, QUERY_BLOCK)
    copies = c.scores + np.where(softmaxes >= MANY_SOFTMAXES, c.many_scores, 0.0)
    scores = copies * softmaxes * width * FLOAT_BYTES
    mlp = floats(rows * width * -(-model.mlp_dim // candidates.tp) * terms.item)
    prompts = c.prompt_cache * rows * terms.layers * width * position
    return floats(np.maximum(scores, c.mlp * mlp) + c.streams * stream + prompts)
