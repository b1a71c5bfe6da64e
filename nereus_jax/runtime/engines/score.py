"""The SCORE engine: token log-probabilities and entropies, values, or rewards of given rows.

Shapes: B rows, S sequence, T response, K places of a flush.
"""

import dataclasses
import enum
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.layout import DP
from nereus_jax.core.packed_cuts import SCORE_FLUSH_PER_RANK
from nereus_jax.models.decoder import Decoder, bind, decoder_graphdef
from nereus_jax.models.forward import PackedFlush, wanted_logprobs, wanted_scalars
from nereus_jax.models.mesh_axes import SHARDED, varying
from nereus_jax.rl.packed_forms import PackedForm, PackedShape, packed_forms
from nereus_jax.runtime.emu import Params, Site, partition_spec
from nereus_jax.runtime.engines.packed import (
    PackedBatch,
    abstract_batch,
    num_flushes,
    pack_batch,
    pick_flush,
    put_batch,
)
from nereus_jax.runtime.programs import Program, ProgramCache, ProgramKey, Recipe


class ScoreKind(enum.StrEnum):
    """What a SCORE pass returns."""

    LOGPROBS = "logprobs"  # logprobs [B, T], entropy [B, T]
    VALUES = "values"  # values [B, T]
    REWARDS = "rewards"  # rewards [B]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreEngine:
    """Scores with one model on one site.

    Attributes:
      config: the model.
      kind: what to compute.
      site: where the model lives.
      dtype: of its weights.
      precision: of matrix products, a `jax.default_matmul_precision` name.
      microbatch_size: longest rows of a replica that are in the layers at a time: its budget of
        tokens is this times S.
      temperature: divides the logits, as in the rollout.
      token_chunk: tokens whose logits exist at a time.
      programs: where compiled programs are kept.
    """

    config: DecoderConfig
    kind: ScoreKind
    site: Site
    dtype: str
    precision: str
    microbatch_size: int
    temperature: float
    token_chunk: int
    programs: ProgramCache = dataclasses.field(compare=False)

    def __post_init__(self) -> None:
        self.config.check_layout(self.site.placement.layout)

    @property
    def head(self) -> Head:
        return Head.LM if self.kind is ScoreKind.LOGPROBS else Head.SCALAR

    def forms(self, num_rows: int, length: int) -> tuple[PackedForm, ...]:
        """The forms of programs that serve a batch of so many rows [B, S]."""
        layout = self.site.placement.layout
        flush = SCORE_FLUSH_PER_RANK * layout.pp
        return packed_forms(num_rows, length, layout, self.microbatch_size, flush)

    def pack(
        self, length: int, prompt_lengths_B: np.ndarray, total_lengths_B: np.ndarray
    ) -> PackedBatch:
        """How a batch is packed: rewards need the last token, the rest what is before a response's
        tokens."""
        prompts, totals = (x.astype(np.int64) for x in (prompt_lengths_B, total_lengths_B))
        if self.kind is ScoreKind.REWARDS:
            firsts, counts = totals - 1, (totals > 0).astype(np.int64)
        else:
            firsts, counts = prompts - 1, totals - prompts
        return pack_batch(self.forms(len(totals), length), totals, firsts, counts)

    def program(self, form: PackedForm) -> Program:
        """The compiled program for a form."""
        return self.programs.get(*self.recipe(form))

    def recipe(self, form: PackedForm) -> Recipe:
        """How the program for a form is made."""
        key = ProgramKey.of(self.site, self, "score", *form)
        return key, lambda: self._lower(form)

    def dispatch(
        self,
        params: Params,
        tokens_BS: np.ndarray,
        prompt_lengths_B: np.ndarray,
        total_lengths_B: np.ndarray,
    ) -> Mapping[str, jax.Array]:
        """Starts a pass; `unpack` brings its results, once fetched, into the rows' order.

        Args:
          params: the model's arrays on this site.
          tokens_BS: right-padded rows, prompt then response.
          prompt_lengths_B: length of each prompt.
          total_lengths_B: length of prompt and response together.
        """
        batch = self.pack(tokens_BS.shape[1], prompt_lengths_B, total_lengths_B)
        arrays = batch.arrays(tokens_BS, total_lengths_B)
        put = put_batch(arrays, batch.microbatches, self.site)
        return self.programs.run(self.recipe(batch.form), params, *put)

    def unpack(
        self,
        outputs: Mapping[str, np.ndarray],
        length: int,
        prompt_lengths_B: np.ndarray,
        total_lengths_B: np.ndarray,
        width: int,
    ) -> dict[str, np.ndarray]:
        """The outputs of `dispatch` by row.

        Args:
          outputs: on the host.
          length: S, columns of the rows that were given to `dispatch`.
          prompt_lengths_B: as given to `dispatch`.
          total_lengths_B: as given to `dispatch`.
          width: T, columns of the response-aligned outputs.

        Returns:
          logprobs and entropy [B, T], or values [B, T], 0 behind the end of a response, or
          rewards [B].
        """
        batch = self.pack(length, prompt_lengths_B, total_lengths_B)
        if self.kind is ScoreKind.REWARDS:
            return {name: batch.take(x, 1)[:, 0] for name, x in outputs.items()}
        return {name: batch.take(x, width) for name, x in outputs.items()}

    def _outputs(
        self, decoder: Decoder, flush: PackedFlush, shape: PackedShape
    ) -> dict[str, jax.Array]:
        """[K] arrays of one pipeline flush."""
        if self.kind is not ScoreKind.LOGPROBS:
            return {str(self.kind): wanted_scalars(decoder, flush, span=shape.span)}
        logprobs, entropy = wanted_logprobs(
            decoder,
            flush,
            span=shape.span,
            temperature=self.temperature,
            token_chunk=self.token_chunk,
        )
        return {"logprobs": logprobs, "entropy": entropy}

    def _lower(self, form: PackedForm) -> jax.stages.Lowered:
        spec = self.config.spec(self.head, self.dtype)
        graphdef = decoder_graphdef(self.config, self.head, SHARDED)
        names = ("logprobs", "entropy") if self.kind is ScoreKind.LOGPROBS else (str(self.kind),)

        def score_part(
            decoder: Decoder, batch: Params, microbatches: jax.Array, shape: PackedShape
        ) -> dict[str, jax.Array]:
            def add(index: jax.Array, results: dict[str, jax.Array]) -> dict[str, jax.Array]:
                flush, _ = pick_flush(batch, index, microbatches, shape)
                outputs = self._outputs(decoder, flush, shape)
                return {name: results[name].at[index].set(outputs[name]) for name in names}

            empty = jnp.zeros((shape.flushes, shape.flush_tokens), jnp.float32)
            results = varying(dict.fromkeys(names, empty), SHARDED.dp)
            return lax.fori_loop(0, num_flushes(microbatches, shape), add, results)

        def score(
            params: Params, batch: tuple[Params, ...], microbatches: jax.Array
        ) -> dict[str, jax.Array]:
            decoder = bind(graphdef, params)
            parts = [
                score_part(decoder, rows, microbatches[kind], form[kind])
                for kind, rows in enumerate(batch)
            ]
            return {
                name: jnp.concatenate([part[name].reshape(1, -1) for part in parts], axis=1)
                for name in names
            }

        mapped = jax.shard_map(
            score,
            mesh=self.site.mesh,
            in_specs=(
                {leaf.name: partition_spec(leaf, spec.rules) for leaf in spec},
                PartitionSpec(DP),
                PartitionSpec(),
            ),
            out_specs=PartitionSpec(DP),
        )
        with jax.default_matmul_precision(self.precision):
            batch = abstract_batch(form, self.site)
            return jax.jit(mapped).lower(self.site.abstract(spec), *batch)
