# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""What the programs of a model-stage work on, in bytes on a device: terms of the memory model.

Everything is an array over candidates [C]. A candidate's program has room for the longest rows:
microbatches of `microbatch_size` rows of the longest prompt and the longest response.
"""

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

from nereus_jax.core.architectures import LAYER_PREFIX, DecoderConfig, Head
from nereus_jax.core.emu_spec import DTYPE_BYTES, EmuSpec
from nereus_jax.core.layout import KV
from nereus_jax.planning.candidates import PREFILL_ROWS, Candidates, Ints, by_degree
from nereus_jax.planning.memory_state import (
    Degrees,
    Floats,
    Shards,
    floats,
    mesh_degrees,
)
from nereus_jax.planning.workload import Workload

QUERY_BLOCK = 512
"""Queries whose scores exist at a time, as attention has it."""
TOKEN_CHUNK = 1024
"""Tokens whose logits exist at a time, as the configuration has it."""
FLOAT_BYTES = 4
"""Norms, scores, softmax and logits are float32 whatever the compute dtype."""

MANY_SOFTMAXES = 4096
"""Rows of scores whose maxima take 16 KiB: found by compiling."""

FLOAT_STREAMS, STREAMS = 6, 5
"""Arrays [tokens, D] that the backward pass of a layer reads: 6 of the two norms in float32, and 5
inputs of products (q, k, v, gate, up) in the compute dtype."""
MLP_ARRAYS = 6
"""Arrays [tokens, F] that it reads: inputs and outputs of gate, up, the activation and down."""
QK_NORM_ARRAYS = 3
"""Arrays in float32 that a norm of queries and keys adds."""
SCORE_ARRAYS = 2
"""Arrays of scores that it reads: the exponentials, and the weights in the compute dtype."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How a run's engines are set beside what a candidate says.

    Attributes:
      token_chunk: tokens whose logits exist at a time.
      prefill_rows: most prompts of a replica that are in the layers at a time.
      kv_cache_tokens: positions of a replica's KV cache, in pages; 0: room for every slot's longest
        row, as where that is less.
      kv_page_tokens: positions of a page.
      unrolled_generate: a decode step runs the layers without a loop, on a second set of weights.
      unrolled_train: an update does, on a second set of weights and gradients.
    """

    token_chunk: int = TOKEN_CHUNK
    prefill_rows: int = PREFILL_ROWS
    kv_cache_tokens: int = 0
    kv_page_tokens: int = 32
    unrolled_generate: bool = False
    unrolled_train: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
    """Sizes of what the programs of a model work on, whatever it ends in: worked out once for all
    its heads.

    Attributes:
      model: sizes of the model.
      workload: of a step.
      candidates: layouts and microbatches.
      param_dtype: of the weights that the program is given.
      compute_dtype: of activations.
      options: of the engines.
    """

    model: DecoderConfig
    workload: Workload
    candidates: Candidates
    param_dtype: str
    compute_dtype: str
    options: EngineOptions

    @property
    def item(self) -> int:
        """Bytes of an activation."""
        return DTYPE_BYTES[self.compute_dtype]

    @functools.cached_property
    def degrees(self) -> Degrees:
        """Sizes of the mesh axes."""
        return mesh_degrees(self.candidates, self.model.num_kv_heads)

    @property
    def span(self) -> int:
        """Longest row, tokens."""
        return self.workload.row_tokens

    @functools.cached_property
    def tokens(self) -> Ints:
        """[C] of a microbatch."""
        return self.candidates.microbatch_size * self.span

    @functools.cached_property
    def flush_tokens(self) -> Ints:
        """[C] of a pipeline flush."""
        return self.candidates.microbatches * self.tokens

    @functools.cached_property
    def piped(self) -> NDArray[np.bool_]:
        """[C] whether there is a pipeline."""
        return self.candidates.pp > 1

    @functools.cached_property
    def ticks(self) -> Ints:
        """[C] of a flush."""
        return self.candidates.microbatches + self.candidates.pp - 1

    @functools.cached_property
    def layers(self) -> Ints:
        """[C] that a rank has, padding included."""
        return -(-self.model.num_layers // self.candidates.pp)

    @functools.cached_property
    def shards(self) -> Shards:
        """What a device holds of the weights, on the layouts of the candidates."""
        return Shards(self.degrees)

    @functools.cached_property
    def layer_params(self) -> Floats:
        """[C] elements of one layer."""
        spec = self.model.spec(Head.SCALAR, self.param_dtype)  # the layers are those of any head
        return floats(self.shards.elements(spec, LAYER_PREFIX) / self.layers)

    @functools.cached_property
    def layers_bytes(self) -> Floats:
        """[C] of the weights of all layers of a rank."""
        return self.layer_params * self.layers * DTYPE_BYTES[self.param_dtype]

    @functools.cached_property
    def chunk(self) -> Ints:
        """[C] tokens whose logits exist at a time."""
        return np.minimum(self.options.token_chunk, self.flush_tokens)

    @functools.cached_property
    def stream(self) -> Floats:
        """[C] bytes of [tokens, D] of a microbatch."""
        return floats(self.tokens * self.model.embed_dim * self.item)

    @functools.cached_property
    def flush_stream(self) -> Floats:
        """[C] bytes of [tokens, D] of a flush, with a pipeline."""
        return np.where(self.piped, self.stream * self.candidates.microbatches, 0.0)

    @functools.cached_property
    def tick_stream(self) -> Floats:
        """[C] bytes of [tokens, D] of all ticks, with a pipeline."""
        return np.where(self.piped, self.stream * self.ticks, 0.0)

    @functools.cached_property
    def mlp(self) -> Floats:
        """[C] bytes of [tokens, F] of a microbatch."""
        width = by_degree(lambda tp: -(-self.model.mlp_dim // tp), self.candidates.tp)
        return floats(self.tokens * width * self.item)

    @property
    def in_blocks(self) -> bool:
        """Whether attention goes block by block of queries."""
        return self.span > QUERY_BLOCK

    @functools.cached_property
    def heads(self) -> Ints:
        """[C] query heads of a rank."""
        return by_degree(lambda tp: self.model.num_heads // tp, self.candidates.tp)

    @functools.cached_property
    def queries(self) -> Floats:
        """[C] bytes of [tokens, H, K] of a microbatch, padded to blocks."""
        rows = -(-self.span // QUERY_BLOCK) * QUERY_BLOCK if self.in_blocks else self.span
        width = self.heads * self.model.head_dim * self.item
        return floats(self.candidates.microbatch_size * rows * width)

    @functools.cached_property
    def keys(self) -> Floats:
        """[C] bytes of [tokens, G, K] of a microbatch."""
        heads = self.model.num_kv_heads // self.degrees[KV]
        return floats(self.tokens * heads * self.model.head_dim * self.item)

    @functools.cached_property
    def scores(self) -> Floats:
        """[C] bytes of the attention scores that exist at a time, float32."""
        return floats(self._softmaxes * self.span * FLOAT_BYTES)

    @property
    def _softmaxes(self) -> Ints:
        """[C] rows of scores that exist at a time."""
        return self.candidates.microbatch_size * self.heads * min(self.span, QUERY_BLOCK)

    @functools.cached_property
    def many_scores(self) -> Floats:
        """[C] bytes of the scores where XLA for CPUs holds one array more, from 4096 rows on."""
        return np.where(self._softmaxes >= MANY_SOFTMAXES, self.scores, 0.0)

    @functools.cached_property
    def layer_weight_bytes(self) -> Floats:
        """[C] of one layer, in the dtype that it is computed with; a loop over one layer cuts
        nothing out of the stack."""
        return floats(np.where(self.layers > 1, self.layer_params * self.item, 0.0))

    @functools.cached_property
    def kept_by_layer(self) -> Floats:
        """[C] bytes that a layer without recomputation keeps of a microbatch for its backward pass.

        What autodiff saves: inputs of products, norms, activations; scores only where attention
        does not go block by block (blocks are recomputed).
        """
        item = self.item
        flat = floats(self.tokens * self.heads * self.model.head_dim * item)
        streams = self.stream / item * (FLOAT_STREAMS * FLOAT_BYTES + STREAMS * item)
        attention = 2 * self.keys + self.queries + flat
        if self.in_blocks:
            attention = attention + flat
        else:
            saved = FLOAT_BYTES + item * (SCORE_ARRAYS - 1)
            masks = np.where(self.piped, 1, 0)  # without a pipeline one mask serves all layers
            attention = attention + self.scores / FLOAT_BYTES * (saved + masks)
        if self.model.qk_norm:
            elements = (self.queries + self.keys) / item
            attention = attention + QK_NORM_ARRAYS * FLOAT_BYTES * elements
        return streams + attention + MLP_ARRAYS * self.mlp

    @functools.cached_property
    def kept_in_a_tick(self) -> Floats:
        """[C] bytes that all layers of a rank keep of a microbatch for its backward pass."""
        return floats(
            np.where(self.candidates.remat, self.stream, self.kept_by_layer) * self.layers
        )

    @functools.cached_property
    def kept(self) -> Floats:
        """[C] the same of a flush."""
        return floats(self.kept_in_a_tick * np.where(self.piped, self.ticks, 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadTerms:
    """What the programs of a model with a head work on beside that, and the head's part in it.

    Attributes:
      terms: of the model.
      head: what it ends in.
    """

    terms: Terms
    head: Head

    @functools.cached_property
    def spec(self) -> EmuSpec:
        """Leaves of the weights."""
        return self.terms.model.spec(self.head, self.terms.param_dtype)

    @functools.cached_property
    def elements(self) -> Ints:
        """[C] of the weights on a device."""
        return self.terms.shards.elements(self.spec)

    @functools.cached_property
    def param_bytes(self) -> Floats:
        """[C] of all weights."""
        return floats(self.elements * DTYPE_BYTES[self.terms.param_dtype])

    @functools.cached_property
    def vocab_rows(self) -> Ints:
        """[C] rows of the vocabulary; 0 where no logits are computed."""
        if self.head is not Head.LM:
            return np.zeros_like(self.terms.candidates.tp)
        candidates = self.terms.candidates
        return -(-self.terms.model.vocab_size // (candidates.pp * candidates.tp))

    @functools.cached_property
    def chunked(self) -> NDArray[np.bool_]:
        """[C] whether the logits come in several chunks."""
        return (self.terms.flush_tokens > self.terms.chunk) & (self.vocab_rows > 0)

    @functools.cached_property
    def logits(self) -> Floats:
        """[C] bytes of one chunk's logits."""
        return floats(self.terms.chunk * self.vocab_rows * FLOAT_BYTES)

    @functools.cached_property
    def head_weight(self) -> Floats:
        """[C] bytes of the vocabulary projection in float32, where chunks add to its gradient."""
        size = floats(self.vocab_rows * self.terms.model.embed_dim * FLOAT_BYTES)
        return np.where(self.chunked, size, 0.0)

    def input_bytes(self, placed: int) -> Floats:
        """[C] of a program's arguments beside the state; exact.

        Args:
          placed: float32 arrays that the objective reads; 0 in SCORE.
        """
        flushes = self.terms.candidates.accumulation
        arrays = 3 + 1 + placed  # tokens, positions, segments
        rows = flushes * self.terms.flush_tokens * 4 * arrays
        count = np.where(self.chunked, flushes * 4, 0)
        microbatches = (flushes > 1) | self.terms.piped | (placed == 0)
        return floats(rows + count + np.where(microbatches, 4, 0))

    def output_bytes(self, arrays: int) -> Floats:
        """[C] of so many float32 results for each token of SCORE."""
        return floats(self.terms.candidates.accumulation * self.terms.flush_tokens * 4 * arrays)
