"""The TRAIN engine: one optimizer update on one minibatch.

The sequences of a minibatch are packed into rows (`packed`), and those cut over dp replicas,
pipeline flushes (gradient accumulation) and microbatches (GPipe, see `models/pipeline.py` for its
memory bound). The loss is a sum over tokens with weights
that were normalized over the whole minibatch, so the update is the same for every layout. Gradients
accumulate on each device in the dtype of the master weights (float32 by default) and are summed
once a minibatch, over dp and over the tensor-parallel ranks that share a parameter. With ZeRO-1
(Rajbhandari et al. 2020) they are reduce-scattered over dp instead, each replica updates its part
of the parameters, and the parts are gathered again.

Shapes: B sequences, S longest sequence, T response, K places of a flush.
"""

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

from nereus_jax.core.architectures import LAYER_PREFIX, DecoderConfig, Head
from nereus_jax.core.emu_spec import EmuSpec
from nereus_jax.core.layout import DP
from nereus_jax.models.decoder import (
    Decoder,
    bind,
    decoder_graphdef,
    stack_layers,
    unstack_layers,
)
from nereus_jax.models.forward import PackedFlush, wanted_logprobs, wanted_scalars
from nereus_jax.models.mesh_axes import SHARDED, varying
from nereus_jax.rl.objectives import Objective
from nereus_jax.rl.packed_forms import PackedForm, packed_forms
from nereus_jax.runtime import host
from nereus_jax.runtime.emu import Params, Site, partition_spec
from nereus_jax.runtime.engines.packed import (
    PackedBatch,
    abstract_batch,
    num_flushes,
    pack_batch,
    pick_flush,
    put_batch,
)
from nereus_jax.runtime.optimizers import OptState, abstract_state, init_state, state_spec
from nereus_jax.runtime.programs import Program, ProgramCache, ProgramKey, Recipe


class TrainState(NamedTuple):
    """What an update changes."""

    params: Mapping[str, Any]
    opt_state: OptState


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainEngine:
    """Trains one model on one site.

    Attributes:
      config: the model.
      head: its head.
      site: where it lives.
      param_dtype: of the master weights.
      compute_dtype: of activations and of the weights in products.
      precision: of matrix products, a `jax.default_matmul_precision` name.
      microbatch_size: longest rows of a replica that are in the layers at a time: its budget of
        tokens is this times S.
      flush_microbatches: microbatches of a pipeline flush; 0: all of a replica's.
      remat: recompute the activations of each layer in the backward pass.
      zero1: shard the optimizer's state over dp.
      unroll: layers that follow each other in the program without a loop; 0: all, on a second set
        of weights and gradients.
      temperature: divides the logits, as in the rollout.
      token_chunk: tokens whose logits exist at a time.
      objective: what is minimized.
      optimizer: how the parameters follow the gradients.
      optimizer_key: hashable, equal for equal optimizers: optax's functions do not compare.
      programs: where compiled programs are kept.
    """

    config: DecoderConfig
    head: Head
    site: Site
    param_dtype: str
    compute_dtype: str
    precision: str
    microbatch_size: int
    flush_microbatches: int
    remat: bool
    zero1: bool
    temperature: float
    token_chunk: int
    objective: Objective
    optimizer: optax.GradientTransformation = dataclasses.field(compare=False)
    optimizer_key: Hashable
    unroll: int = 1
    programs: ProgramCache = dataclasses.field(compare=False)

    def __post_init__(self) -> None:
        self.config.check_layout(self.site.placement.layout)

    @property
    def spec(self) -> EmuSpec:
        """The leaves of the parameters."""
        return self.config.spec(self.head, self.param_dtype)

    @property
    def moment_spec(self) -> EmuSpec:
        """The leaves that an array of the optimizer's state takes after."""
        return self.spec.with_zero(self.site.mesh_shape) if self.zero1 else self.spec

    @property
    def opt_state_spec(self) -> OptState:
        """The optimizer's state, a LeafSpec in the place of each array like a parameter."""
        return state_spec(self.optimizer, self.moment_spec)

    def abstract_opt_state(self) -> OptState:
        """Shapes and shardings of the optimizer's state."""
        return abstract_state(self.site, self.moment_spec, self.opt_state_spec)

    def init(self, params: Mapping[str, jax.Array]) -> TrainState:
        """A state with these parameters and a fresh optimizer."""
        opt_state = init_state(self.optimizer, params, self.abstract_opt_state())
        return TrainState(params, opt_state)

    def forms(self, num_rows: int, length: int) -> tuple[PackedForm, ...]:
        """The forms of programs that serve a minibatch of so many rows [B, S]."""
        layout = self.site.placement.layout
        return packed_forms(num_rows, length, layout, self.microbatch_size, self.flush_microbatches)

    def pack(
        self, length: int, prompt_lengths_B: np.ndarray, total_lengths_B: np.ndarray
    ) -> PackedBatch:
        """How a minibatch is packed."""
        prompts, totals = (x.astype(np.int64) for x in (prompt_lengths_B, total_lengths_B))
        forms = self.forms(len(totals), length)
        return pack_batch(forms, totals, prompts - 1, totals - prompts)

    def program(self, form: PackedForm) -> Program:
        """The compiled update for a form."""
        return self.programs.get(*self.recipe(form))

    def recipe(self, form: PackedForm) -> Recipe:
        """How the program for a form is made."""
        key = ProgramKey.of(self.site, self, "train", *form)
        return key, lambda: self._lower(form)

    def dispatch(
        self,
        state: TrainState,
        tokens_BS: np.ndarray,
        prompt_lengths_B: np.ndarray,
        total_lengths_B: np.ndarray,
        arrays: Mapping[str, np.ndarray],
        scalars: Mapping[str, float],
    ) -> tuple[TrainState, Mapping[str, jax.Array]]:
        """Starts an update; `state` is given up.

        Args:
          state: on this site.
          tokens_BS: right-padded rows of the minibatch.
          prompt_lengths_B: length of each prompt.
          total_lengths_B: length of prompt and response together.
          arrays: [B, T] float32, at least the objective's `batch_keys`.
          scalars: at least the objective's `scalar_keys`.

        Returns:
          The new state (the old one where a gradient was not finite), and scalars: loss, grad_norm,
          finite (1 or 0), and the objective's metrics.
        """
        packed = self.pack(tokens_BS.shape[1], prompt_lengths_B, total_lengths_B)
        placed = {name: arrays[name].astype(np.float32) for name in self.objective.batch_keys}
        rows = packed.arrays(tokens_BS, total_lengths_B, placed)
        put = put_batch(rows, packed.microbatches, self.site)
        everywhere = self.site.sharding()
        values = {
            name: host.put(np.asarray(scalars[name], np.float32), everywhere)
            for name in self.objective.scalar_keys
        }
        return self.programs.run(self.recipe(packed.form), state, *put, values)

    def gradients(self, form: PackedForm) -> Any:
        """A function (params, batch, microbatches, scalars) -> (gradients, metrics) of global
        arrays."""
        graphdef = decoder_graphdef(self.config, self.head, SHARDED)
        spec, moments = self.spec, self.moment_spec

        def flush_loss(
            weights: _Weights,
            stacked: Params,
            flush: PackedFlush,
            placed: Params,
            scalars: Params,
            span: int,
        ) -> tuple[jax.Array, dict[str, jax.Array]]:
            # The layers cast their own weights, microbatch by microbatch: see Decoder.run_layers.
            cast = {
                name: x if name.startswith(LAYER_PREFIX) else x.astype(self.compute_dtype)
                for name, x in {**stacked, **weights.stacked}.items()
            }
            outputs = self._outputs(bind(graphdef, cast), flush, span, weights.layers)
            loss, metrics = self.objective(outputs, placed, scalars)
            return loss, {"loss": loss, **metrics}

        def local(
            params: Params, batch: tuple[Params, ...], microbatches: jax.Array, scalars: Params
        ) -> tuple[Params, dict[str, jax.Array]]:
            mine = {name: varying(x, _summed_axes(name)) for name, x in params.items()}
            weights = _Weights(mine)
            if self.unroll == 0:
                weights = _Weights(*unstack_layers(mine))

            def grad(kind: int, index: jax.Array | int) -> _Sums:
                shape = form[kind]
                flush, placed = pick_flush(batch[kind], index, microbatches[kind], shape)
                of = jax.grad(flush_loss, has_aux=True)
                return of(weights, mine, flush, placed, scalars, shape.span)

            def add_flushes(sums: _Sums, kind: int, first: int) -> _Sums:
                return lax.fori_loop(
                    first,
                    num_flushes(microbatches[kind], form[kind]),
                    lambda index, sums: jax.tree.map(jnp.add, sums, grad(kind, index)),
                    sums,
                )

            sums = grad(0, 0)
            if form[0].flushes > 1:
                sums = add_flushes(sums, 0, 1)
            for kind in range(1, len(form)):
                sums = add_flushes(sums, kind, 0)
            grads, metrics = sums
            whole = grads.stacked
            if grads.layers is not None:
                whole = stack_layers(grads.stacked, grads.layers)
            return _reduce(whole, spec, moments), lax.psum(metrics, DP)

        return jax.shard_map(
            local,
            mesh=self.site.mesh,
            in_specs=(
                {leaf.name: partition_spec(leaf, spec.rules) for leaf in spec},
                PartitionSpec(DP),
                PartitionSpec(),
                PartitionSpec(),
            ),
            out_specs=(
                {leaf.name: partition_spec(leaf, spec.rules) for leaf in moments},
                PartitionSpec(),
            ),
        )

    def _outputs(
        self,
        decoder: Decoder,
        flush: PackedFlush,
        span: int,
        layers: list[Params] | None,
    ) -> dict[str, jax.Array]:
        """[1, K] arrays of one pipeline flush."""
        how: dict[str, Any] = {
            "span": span,
            "remat": self.remat,
            "unroll": self.unroll,
            "layers": layers,
        }
        if self.head is Head.SCALAR:
            return {"values": wanted_scalars(decoder, flush, **how)[None]}
        logprobs, entropy = wanted_logprobs(
            decoder, flush, temperature=self.temperature, token_chunk=self.token_chunk, **how
        )
        return {"logprobs": logprobs[None], "entropy": entropy[None]}

    def _update(self, state: TrainState, grads: Params) -> tuple[TrainState, jax.Array]:
        """Applies the gradients on the optimizer's sharding; returns the gradients' norm too."""
        owned = self.site.shardings(self.moment_spec)
        held = self.site.shardings(self.spec)
        params = lax.with_sharding_constraint(state.params, owned)
        norm = optax.tree.norm(grads)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, params)
        params = optax.apply_updates(params, updates)
        new = TrainState(lax.with_sharding_constraint(params, held), opt_state)
        finite = jnp.isfinite(norm)
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state), norm

    def _lower(self, form: PackedForm) -> jax.stages.Lowered:
        gradients = self.gradients(form)

        def update(
            state: TrainState, batch: tuple[Params, ...], microbatches: jax.Array, scalars: Params
        ) -> tuple[TrainState, dict[str, jax.Array]]:
            grads, metrics = gradients(state.params, batch, microbatches, scalars)
            new, norm = self._update(state, grads)
            return new, {**metrics, "grad_norm": norm, "finite": jnp.isfinite(norm) * 1.0}

        abstract = TrainState(self.site.abstract(self.spec), self.abstract_opt_state())
        shardings = jax.tree.map(lambda x: x.sharding, abstract)
        everywhere = self.site.sharding()
        batch = abstract_batch(form, self.site, self.objective.batch_keys)
        scalars = {
            name: jax.ShapeDtypeStruct((), jnp.float32, sharding=everywhere)
            for name in self.objective.scalar_keys
        }
        jitted = jax.jit(update, donate_argnums=0, out_shardings=(shardings, everywhere))
        with jax.default_matmul_precision(self.precision):
            return jitted.lower(abstract, *batch, scalars)


class _Weights(NamedTuple):
    """What an update differentiates by: stacked weights, and layers that were unstacked."""

    stacked: Params
    layers: list[Params] | None = None


_Sums = tuple[_Weights, dict[str, jax.Array]]
"""Gradients and metrics, summed over flushes."""


def _summed_axes(name: str) -> tuple[str, ...]:
    """Mesh axes over which a parameter's gradient is summed once at the end.

    Gradients of other axes are summed inside the backward pass (by the transpose of the implicit
    cast), which for a vector of a layer would be one small all-reduce in every layer.
    """
    return SHARDED.dp + (SHARDED.tp if name.startswith(LAYER_PREFIX) else ())


def _reduce(grads: Params, spec: EmuSpec, moments: EmuSpec) -> Params:
    """Sums the gradients over the ranks that share a parameter; scattered over dp under ZeRO-1."""
    reduced = {}
    for leaf, moment in zip(spec, moments, strict=True):
        split_over = {axis for axes in leaf.dim_axes(spec.rules) for axis in axes}
        shared = tuple(a for a in _summed_axes(leaf.name) if a not in split_over)
        grad = grads[leaf.name]
        if moment.zero_dim is not None:
            grad = lax.psum_scatter(grad, DP, scatter_dimension=moment.zero_dim, tiled=True)
            shared = tuple(a for a in shared if a != DP)
        reduced[leaf.name] = lax.psum(grad, shared) if shared else grad
    return reduced
