"""The one statement of a decoder model: its sizes, its leaves, and formulas for its FLOPs and
bytes.

The flax modules are built from the leaf table, the planner prices it, and the Hugging Face reader
maps onto it. Weights are stored [in, out] (the vocabulary matrices [V, D]); the leaves of all
layers are stacked on a leading dim.

Llama, SmolLM2, Qwen2 (biases of q, k and v) and Qwen3 (norms of q and k) differ in a few leaves and
in their rotary frequencies; all of that is said here and nowhere else.
"""

import dataclasses
import enum
import functools
import math

from nereus_jax.core.emu_spec import DTYPE_BYTES, EmuSpec, LeafSpec
from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.layout import ParallelLayout

LAYER_PREFIX = "layers."


class Head(enum.StrEnum):
    """What a decoder ends in."""

    LM = "lm"  # token logits: actor, reference
    SCALAR = "scalar"  # one number a position: critic, reward model


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearRope:
    """Rotary frequencies divided by a factor: positions interpolated (Chen et al. 2023).

    Attributes:
      factor: how many times longer rows become.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_positive(self)

    def scale(self, frequency: float) -> float:
        """The frequency to use in the place of this one, radians a position."""
        return frequency / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """Llama 3.1's rotary frequencies: only those of long waves are divided by a factor.

    A wave shorter than `original_max_positions / high_freq_factor` positions stays as it is, one
    longer than `original_max_positions / low_freq_factor` becomes `factor` times as long, and
    between the two the frequency goes linearly from one to the other.

    Attributes:
      factor: how many times longer rows become.
      low_freq_factor: waves that fit less often into a row of pretraining are stretched.
      high_freq_factor: waves that fit more often into it stay; above `low_freq_factor`.
      original_max_positions: longest row of pretraining.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        _check_positive(self)
        if not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor must be above low_freq_factor {self.low_freq_factor}, "
                f"got {self.high_freq_factor}"
            )

    def scale(self, frequency: float) -> float:
        """The frequency to use in the place of this one, radians a position."""
        waves = self.original_max_positions * frequency / (2 * math.pi)
        kept = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = min(max(kept, 0.0), 1.0)
        return (1 - kept) * frequency / self.factor + kept * frequency


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of a Llama-like decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU.

    Attributes:
      num_layers: decoder layers.
      embed_dim: width of the residual stream.
      num_heads: query heads.
      num_kv_heads: key/value heads; divides `num_heads`.
      head_dim: width of one head.
      mlp_dim: width of the gated feed-forward layer.
      vocab_size: rows of the embedding.
      rope_theta: base of the rotary frequencies.
      norm_eps: epsilon of RMSNorm.
      tie_embeddings: the head uses the embedding matrix.
      max_positions: longest sequence that the model was made for.
      rope_scaling: how the rotary frequencies are changed for long rows; None: not at all.
      qkv_bias: queries, keys and values have a bias (Qwen2).
      qk_norm: an RMSNorm over each head of queries and keys before they are rotated (Qwen3).
    """

    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    vocab_size: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    max_positions: int = 4096
    rope_scaling: LinearRope | Llama3Rope | None = None
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")

    def spec(self, head: Head, dtype: str = "float32") -> EmuSpec:
        """The leaves of a replica with this head."""
        return _spec(self, head, dtype)

    def check_layout(self, layout: ParallelLayout) -> None:
        """Raises InfeasiblePlanError if the model cannot be split like this.

        Only whole query heads go to a tensor-parallel rank; the rest is padded or replicated.
        """
        if self.num_heads % layout.tp:
            allowed = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise InfeasiblePlanError(
                f"tp={layout.tp} does not divide the {self.num_heads} query heads of the model; "
                f"use one of {allowed}"
            )

    def rope_frequencies(self) -> tuple[float, ...]:
        """The rotary frequencies of the head_dim / 2 planes of a head, radians a position."""
        planes = range(self.head_dim // 2)
        plain = [self.rope_theta ** (-2.0 * i / self.head_dim) for i in planes]
        scaling = self.rope_scaling
        return tuple(plain if scaling is None else map(scaling.scale, plain))

    def layer_params(self) -> int:
        """Elements of one layer."""
        return sum(x.num_elements for x in self._layer_leaves()) // self.num_layers

    def _layer_leaves(self) -> list[LeafSpec]:
        return [x for x in self.spec(Head.LM) if x.name.startswith(LAYER_PREFIX)]

    def num_params(self, head: Head) -> int:
        """Elements of the whole model."""
        return self.spec(head).num_elements

    def forward_flops(self, num_tokens: int, mean_context: float, head_tokens: int) -> float:
        """FLOPs of one forward pass, counting a multiply-add as two.

        2 * tokens * (matrix elements) + 4 * tokens * context * heads * head_dim a layer (scores and
        weighted sum), + 2 * head_tokens * V * D for the vocabulary projection. Backward is twice
        this; recomputation adds it once more.

        Args:
          num_tokens: tokens through the layers.
          mean_context: mean number of positions that a token attends to.
          head_tokens: tokens whose vocabulary projection is computed (0 for a scalar head).
        """
        matrices = sum(x.num_elements for x in self._layer_leaves() if len(x.shape) == 3)
        attention = 4.0 * mean_context * self.num_heads * self.head_dim * self.num_layers
        layers = num_tokens * (2.0 * matrices + attention)
        return layers + 2.0 * head_tokens * self.vocab_size * self.embed_dim

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values that one token leaves in the cache, all layers and heads."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]


@functools.cache  # a plan search asks for the same few again and again
def _spec(model: DecoderConfig, head: Head, dtype: str) -> EmuSpec:
    d, q = model.embed_dim, model.num_heads * model.head_dim
    kv, f = model.num_kv_heads * model.head_dim, model.mlp_dim
    layer: list[tuple[str, tuple[int, ...], tuple[str | None, ...]]] = [
        ("attn_norm", (d,), ("embed",)),
        ("q", (d, q), ("embed", "heads")),
        ("k", (d, kv), ("embed", "kv_heads")),
        ("v", (d, kv), ("embed", "kv_heads")),
        ("o", (q, d), ("heads", "embed")),
        ("mlp_norm", (d,), ("embed",)),
        ("gate", (d, f), ("embed", "mlp")),
        ("up", (d, f), ("embed", "mlp")),
        ("down", (f, d), ("mlp", "embed")),
    ]
    if model.qkv_bias:
        layer.append(("q_bias", (q,), ("heads",)))
        layer.append(("k_bias", (kv,), ("kv_heads",)))
        layer.append(("v_bias", (kv,), ("kv_heads",)))
    if model.qk_norm:  # one for all heads, so that every rank needs it whole
        layer.append(("q_norm", (model.head_dim,), (None,)))
        layer.append(("k_norm", (model.head_dim,), (None,)))
    table = [("embed", (model.vocab_size, d), ("vocab", "embed"))]
    table += [
        (LAYER_PREFIX + name, (model.num_layers, *shape), ("layers", *axes))
        for name, shape, axes in layer
    ]
    table.append(("final_norm", (d,), ("embed",)))
    if head is Head.SCALAR:
        table.append(("scalar_head", (d, 1), ("embed", None)))
    elif not model.tie_embeddings:
        table.append(("lm_head", (model.vocab_size, d), ("vocab", "embed")))
    return EmuSpec(
        leaves=tuple(
            LeafSpec(name=name, shape=shape, dtype=dtype, logical_axes=axes)
            for name, shape, axes in table
        )
    )


def _check_positive(sizes: LinearRope | Llama3Rope | DecoderConfig) -> None:
    """Raises ValueError if a number of a dataclass is not positive."""
    for field in dataclasses.fields(sizes):
        value = getattr(sizes, field.name)
        if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
            raise ValueError(f"{field.name} must be positive, got {value!r}")
