# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""Bytes of the GENERATE program: the KV cache, and what prefill and a decode step work with."""

import numpy as np

from nereus_jax.core.layout import KV
from nereus_jax.planning.candidates import Ints
from nereus_jax.planning.memory_coefficients import Coefficients
from nereus_jax.planning.memory_state import Floats, floats
from nereus_jax.planning.memory_terms import (
    FLOAT_BYTES,
    MANY_SOFTMAXES,
    QUERY_BLOCK,
    HeadTerms,
    Terms,
)

ROW_NUMBERS = 4
"""Of a row beside its prompt: length, sample, limit, place."""
RESPONSE_BYTES = 8
"""Of a token: itself and its log-probability."""
TABLE_BYTES = 4
"""Of an entry of the table of pages."""
ROW_RESULT_BYTES = 5
"""Of a row beside its tokens: length, and whether it ended."""


def decode_bytes(own: HeadTerms, coefficients: Coefficients) -> dict[str, Floats]:
    """Bytes by kind, [C] each."""
    c, terms = coefficients.generate, own.terms
    candidates, model = terms.candidates, terms.model
    slots, item, options = candidates.microbatch_size, terms.item, terms.options
    # Keys and values of one position in one layer.
    position = 2 * (model.num_kv_heads // terms.degrees[KV]) * model.head_dim * item
    paged = (options.kv_cache_tokens > 0) & (options.kv_cache_tokens < slots * terms.span)
    page = options.kv_page_tokens
    pages = -(-terms.span // page)  # of the longest row
    pool = options.kv_cache_tokens // page * page
    cache = floats(np.where(paged, pool, slots * terms.span) * terms.layers * position)
    group = -(-slots // candidates.pp)
    read = np.where(paged, pages * page, terms.span)
    step = c.cache_read * group * read * position
    step = step + c.logits * group * own.vocab_rows * FLOAT_BYTES
    work = np.maximum(_prefill_bytes(terms, coefficients, position), step)
    work = work + np.where(paged, slots * pages * TABLE_BYTES, 0)
    rows = np.maximum(-(-terms.workload.rows // candidates.dp), slots)
    # The branch that fills free slots copies the cache on GPUs.
    waiting = (rows > slots) | paged
    tokens = terms.workload.max_response_tokens
    responses = floats(rows * tokens * RESPONSE_BYTES)
    weights = c.layer_weights * terms.layer_weight_bytes
    if options.unrolled_generate:
        weights = terms.layers_bytes
    return {
        "inputs": floats(4 * rows * (terms.workload.prompt_width + ROW_NUMBERS) + 4),
        "results": responses + rows * ROW_RESULT_BYTES,
        "kv_cache": cache * np.where(waiting, 1.0 + c.refilled_cache, 1.0),
        "activations": weights + work + c.responses * responses * candidates.dp,
    }


def _prefill_bytes(terms: Terms, coefficients: Coefficients, position: Ints) -> Floats:
    """What a microbatch of prompts works with."""
    c, model, candidates = coefficients.generate, terms.model, terms.candidates
    slots = candidates.microbatch_size
    rows = np.ones_like(slots)
    most = min(terms.options.prefill_rows, int(slots.max(initial=1)))
    for size in range(2, most + 1):  # the largest divisor of the slots, as the first rows enter
        rows = np.where(slots % size == 0, size, rows)
    width = terms.workload.prompt_width
    stream = floats(rows * width * model.embed_dim * terms.item)
    softmaxes = rows * terms.heads * min(width, QUERY_BLOCK)
    copies = c.scores + np.where(softmaxes >= MANY_SOFTMAXES, c.many_scores, 0.0)
    scores = copies * softmaxes * width * FLOAT_BYTES
    mlp = floats(rows * width * -(-model.mlp_dim // candidates.tp) * terms.item)
    prompts = c.prompt_cache * rows * terms.layers * width * position
    return floats(np.maximum(scores, c.mlp * mlp) + c.streams * stream + prompts)
