# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""Bytes of the GENERATE program: the KV cache, and what prefill and a decode step work with."""

import numpy as np

from nereus_jax.core.layout import KV
from nereus_jax.planning.memory_coefficients import Coefficients
from nereus_jax.planning.memory_state import Floats, floats
from nereus_jax.planning.memory_terms import FLOAT_BYTES, QUERY_BLOCK, Terms

PREFILL_ROWS = 4
"""Prompts that are in the layers at a time."""


def decode_bytes(terms: Terms, coefficients: Coefficients) -> dict[str, Floats]:
    """Bytes by kind, [C] each."""
    c, candidates, model = coefficients.generate, terms.candidates, terms.model
    slots, item = candidates.microbatch_size, terms.item
    kv_heads = model.num_kv_heads // terms.degrees[KV]
    # Keys and values of one layer.
    row = floats(2 * terms.span * kv_heads * model.head_dim * item)
    cache = slots * terms.layers * row
    group = -(-slots // candidates.pp)
    rows = np.minimum(PREFILL_ROWS, group)
    width = terms.workload.prompt_lengths.max
    stream = floats(rows * width * model.embed_dim * item)
    scores = floats(rows * terms.heads * min(width, QUERY_BLOCK) * width * FLOAT_BYTES)
    mlp = floats(rows * width * -(-model.mlp_dim // candidates.tp) * item)
    prefill = np.maximum(c.scores * scores, c.mlp * mlp) + c.streams * stream
    prefill = prefill + c.prompt_cache * rows * terms.layers * row * width / terms.span
    step = c.cache_read * group * row + c.logits * group * terms.vocab_rows * FLOAT_BYTES
    replica_rows = -(-terms.workload.rows // candidates.dp)
    return {
        "inputs": floats(4 * replica_rows * (width + 3) + 4),
        "kv_cache": c.cache * cache,
        "activations": c.layer_weights * terms.layer_weight_bytes + np.maximum(prefill, step),
    }
