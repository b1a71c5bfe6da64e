"""A Llama-like decoder in flax.nnx, with its layers stacked, built from the leaf table of
`core/architectures.py`.

The modules work on whole arrays and, inside a manual `shard_map`, on one device's shards: head
counts are read off the shapes, and the collectives of tensor parallelism (one all-reduce after
attention, one after the feed-forward, Shoeybi et al. 2019) are written out. Padding keeps itself at
zero: a padded layer has zero output projections, so it adds nothing to the residual stream and
every one of its gradients is exactly zero.

Shapes: B batch, S sequence, D embed, H query heads and G key/value heads held here, K head dim, R
query heads per key/value head, V vocabulary rows held here, L layers held here.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from nereus_jax.core.architectures import LAYER_PREFIX, DecoderConfig, Head
from nereus_jax.models.attention import causal_attention, match_heads
from nereus_jax.models.mesh_axes import UNSHARDED, MeshAxes, axis_index, psum

Layer = nnx.State | Mapping[str, jax.Array]
"""The weights of one layer, by name."""


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x * rsqrt(mean(x^2) + eps) * scale over the last dim, computed in float32 (Zhang and Sennrich
    2019)."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    scale = jnp.expand_dims(scale.astype(jnp.float32), range(x.ndim - 1))
    return (x32 * inverse * scale).astype(x.dtype)


def rope_tables(
    positions_BS: jax.Array, frequencies: Sequence[float]
) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B, S, 1, K/2] of the rotary angles position * frequency (Su et al. 2021)."""
    frequencies_K = jnp.asarray(frequencies, jnp.float32)
    angles = positions_BS.astype(jnp.float32)[:, :, None, None] * frequencies_K[None, None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x_BSHK: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the two halves of each head (the half-split order of Hugging Face's Llama)."""
    x1, x2 = jnp.split(x_BSHK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return rotated.astype(x_BSHK.dtype)


def linear(x_BSD: jax.Array, weight_DF: jax.Array) -> jax.Array:
    """x @ weight [B, S, F] as a product of two matrices.

    With batch and sequence as two dims the gradient of the weight would sum over both, for which
    XLA transposes an operand: about a fifth of the time of an update on a CPU.
    """
    batch, length, width = x_BSD.shape
    return (x_BSD.reshape(batch * length, width) @ weight_DF).reshape(batch, length, -1)


class Block(nnx.Module):
    """One decoder layer: attention and a gated feed-forward, each with a norm before it."""

    attn_norm: nnx.Param
    q: nnx.Param
    k: nnx.Param
    v: nnx.Param
    o: nnx.Param
    mlp_norm: nnx.Param
    gate: nnx.Param
    up: nnx.Param
    down: nnx.Param
    q_bias: nnx.Param
    k_bias: nnx.Param
    v_bias: nnx.Param
    q_norm: nnx.Param
    k_norm: nnx.Param

    def __init__(self, config: DecoderConfig, axes: MeshAxes, dtype: str, rngs: nnx.Rngs):
        self.config = config
        self.axes = axes
        for leaf in config.spec(Head.LM, dtype):
            if leaf.name.startswith(LAYER_PREFIX):
                name = leaf.name.removeprefix(LAYER_PREFIX)
                setattr(self, name, _param(name, leaf.shape[1:], leaf.dtype, rngs))

    def qkv(
        self, x_BSD: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rotated queries [B, S, H, K] and keys [B, S, G, K], and values [B, S, G, K]."""
        batch, length, _ = x_BSD.shape
        eps = self.config.norm_eps
        h_BSD = rms_norm(x_BSD, self.attn_norm[...], eps)
        flat = [linear(h_BSD, w[...]) for w in (self.q, self.k, self.v)]
        if self.config.qkv_bias:
            biases = (self.q_bias, self.k_bias, self.v_bias)
            flat = [x + b[...][None, None, :] for x, b in zip(flat, biases, strict=True)]
        q, k, v = (x.reshape(batch, length, -1, self.config.head_dim) for x in flat)
        if self.config.qk_norm:
            q, k = rms_norm(q, self.q_norm[...], eps), rms_norm(k, self.k_norm[...], eps)
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v

    def match_heads(
        self, q: jax.Array, k: jax.Array, v: jax.Array, dim: int = 2
    ) -> tuple[jax.Array, jax.Array]:
        """Keys and values, heads in `dim`, in the order in which the query heads held here use
        them."""
        return match_heads(q.shape[2], k, v, self.config, self.axes, dim)

    def output(self, x_BSD: jax.Array, attended_BSHK: jax.Array) -> jax.Array:
        """Adds the attention output, then the feed-forward output, to the residual stream."""
        batch, length, _ = x_BSD.shape
        flat = attended_BSHK.reshape(batch, length, -1)
        x_BSD = x_BSD + psum(linear(flat, self.o[...]), self.axes.tp)
        h_BSD = rms_norm(x_BSD, self.mlp_norm[...], self.config.norm_eps)
        gated = jax.nn.silu(linear(h_BSD, self.gate[...])) * linear(h_BSD, self.up[...])
        return x_BSD + psum(linear(gated, self.down[...]), self.axes.tp)

    def __call__(
        self,
        x_BSD: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        segments_BS: jax.Array | None = None,
        span: int | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Causal attention over whole rows, see `causal_attention`; also returns keys and
        values."""
        q, k, v = self.qkv(x_BSD, cos, sin)
        keys, values = self.match_heads(q, k, v)
        attended = causal_attention(q, keys, values, segments_BS=segments_BS, span=span)
        return self.output(x_BSD, attended), (k, v)


class Decoder(nnx.Module):
    """Embedding, stacked layers, final norm and a head; the head's work is the caller's.

    Rows hold one sequence from column 0 on, or several in segments with positions of their own.
    Padding comes last in a row, or has a segment to itself: the mask keeps it out.
    """

    embed: nnx.Param
    final_norm: nnx.Param
    lm_head: nnx.Param
    scalar_head: nnx.Param

    def __init__(
        self,
        config: DecoderConfig,
        head: Head,
        *,
        axes: MeshAxes = UNSHARDED,
        dtype: str = "float32",
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.head = head
        self.axes = axes
        for leaf in config.spec(head, dtype):
            if not leaf.name.startswith(LAYER_PREFIX):
                setattr(self, leaf.name, _param(leaf.name, leaf.shape, leaf.dtype, rngs))

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap
        def stacked(layer_rngs: nnx.Rngs) -> Block:
            return Block(config, axes, dtype, layer_rngs)

        self.layers = stacked(rngs)

    @property
    def vocab_offset(self) -> jax.Array | int:
        """Token id of the first vocabulary row held here."""
        return axis_index(self.axes.vocab) * self.embed.shape[0]

    @property
    def head_VD(self) -> jax.Array:
        """The rows of the vocabulary projection held here."""
        return self.embed[...] if self.config.tie_embeddings else self.lm_head[...]

    def embed_tokens(self, tokens_BS: jax.Array) -> jax.Array:
        """Embeddings [B, S, D]: the sum of what each device finds in the rows it holds."""
        table_VD = self.embed[...]
        if not self.axes.vocab:
            return table_VD[tokens_BS]
        rows_BS = tokens_BS - self.vocab_offset
        here_BS = (rows_BS >= 0) & (rows_BS < table_VD.shape[0])
        found_BSD = table_VD[jnp.clip(rows_BS, 0, table_VD.shape[0] - 1)]
        return psum(jnp.where(here_BS[:, :, None], found_BSD, 0), self.axes.vocab)

    def run_layers(
        self,
        x_BSD: jax.Array,
        positions_BS: jax.Array | None = None,
        segments_BS: jax.Array | None = None,
        *,
        span: int | None = None,
        remat: bool = False,
        unroll: int = 1,
        layers: Sequence[Mapping[str, jax.Array]] | None = None,
    ) -> jax.Array:
        """The layers held here over whole rows.

        Weights may be wider than the activations: each layer casts its own, so that gradients of
        several microbatches add up in the weights' dtype.

        Args:
          x_BSD: embedded tokens.
          positions_BS: of the tokens in their sequences; None: counted from column 0.
          segments_BS: which sequence of its row a token belongs to; None: one a row.
          span: longest sequence; None: the row.
          remat: recompute the activations of a layer in the backward pass.
          unroll: layers that follow each other in the program without a loop; 0: all.
          layers: `unstack_layers` of this decoder, in the place of its own stacked ones; all follow
            each other without a loop.
        """
        if positions_BS is None:
            positions_BS = jnp.arange(x_BSD.shape[1])[None, :]
        cos, sin = self.rope(positions_BS)
        graphdef, stacked = nnx.split(self.layers)

        def body(x: jax.Array, layer: Layer) -> tuple[jax.Array, None]:
            cast = jax.tree.map(lambda w: w.astype(x.dtype), layer)
            return nnx.merge(graphdef, cast)(x, cos, sin, segments_BS, span)[0], None

        body = jax.checkpoint(body) if remat else body
        if layers is not None:
            for layer in layers:
                x_BSD, _ = body(x_BSD, layer)
            return x_BSD
        return jax.lax.scan(body, x_BSD, stacked, unroll=unroll or True)[0]

    def rope(self, positions_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rotary tables for positions [B or 1, S]."""
        return rope_tables(positions_BS, self.config.rope_frequencies())

    def normalize(self, x_BSD: jax.Array) -> jax.Array:
        """The final norm."""
        return rms_norm(x_BSD, self.final_norm[...], self.config.norm_eps)

    def scalars(self, hidden_BSD: jax.Array) -> jax.Array:
        """The scalar head's output [B, S], float32."""
        return (hidden_BSD.astype(jnp.float32) @ self.scalar_head[...].astype(jnp.float32))[..., 0]

    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        """Logits [B, S, V] or values [B, S] of a whole model on one device, for small inputs."""
        hidden_BSD = self.normalize(self.run_layers(self.embed_tokens(tokens_BS)))
        if self.head is Head.SCALAR:
            return self.scalars(hidden_BSD)
        return jnp.einsum(
            "bsd,vd->bsv", hidden_BSD, self.head_VD, preferred_element_type=jnp.float32
        )


def _param(name: str, shape: tuple[int, ...], dtype: str, rngs: nnx.Rngs) -> nnx.Param:
    return nnx.Param(initial_values(name, shape, rngs.params()).astype(dtype))


def initial_values(name: str, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """Initial values of a leaf: ones for norms, zeros for biases and a scalar head, else
    normal(0, 0.02)."""
    if name.endswith("norm"):
        return jnp.ones(shape, jnp.float32)
    if name == "scalar_head" or name.endswith("bias"):
        return jnp.zeros(shape, jnp.float32)
    return 0.02 * jax.random.normal(key, shape, jnp.float32)


def decoder_graphdef(config: DecoderConfig, head: Head, axes: MeshAxes) -> nnx.GraphDef:
    """The structure of a decoder without its arrays; made outside any trace."""
    module = nnx.eval_shape(lambda: Decoder(config, head, axes=axes, rngs=nnx.Rngs(0)))
    return nnx.split(module)[0]


def bind(graphdef: nnx.GraphDef, params: Mapping[str, jax.Array]) -> Decoder:
    """A decoder over named arrays (whole ones, or one device's shards)."""
    nested: dict[str, object] = {}
    for name, value in params.items():
        if name.startswith(LAYER_PREFIX):
            nested.setdefault("layers", {})[name.removeprefix(LAYER_PREFIX)] = value  # type: ignore[index]
        else:
            nested[name] = value
    return nnx.merge(graphdef, nested)


def unstack_layers(
    params: Mapping[str, jax.Array],
) -> tuple[dict[str, jax.Array], list[dict[str, jax.Array]]]:
    """Named arrays as those of no layer, and for each layer held here its own by short name.

    A slice of a stacked array is a copy, and a loop that takes it would copy in every turn: who
    runs the layers more than once unstacks them before, and pays with memory for a second set of
    weights.
    """
    stacked = {n.removeprefix(LAYER_PREFIX): x for n, x in params.items() if _is_layer(n)}
    count = next(iter(stacked.values())).shape[0]
    rest = {name: x for name, x in params.items() if not _is_layer(name)}
    return rest, [{name: x[i] for name, x in stacked.items()} for i in range(count)]


def stack_layers(
    rest: Mapping[str, jax.Array], layers: Sequence[Mapping[str, jax.Array]]
) -> dict[str, jax.Array]:
    """The inverse of `unstack_layers`."""
    stacked = {f"{LAYER_PREFIX}{n}": jnp.stack([x[n] for x in layers]) for n in layers[0]}
    return {**rest, **stacked}


def _is_layer(name: str) -> bool:
    return name.startswith(LAYER_PREFIX)


def flat_params(module: Decoder) -> dict[str, jax.Array]:
    """The named arrays of a decoder: the inverse of `bind`."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(str(p) for p in path): leaf[...] for path, leaf in flat}
