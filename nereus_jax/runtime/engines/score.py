"""The SCORE engine: token log-probabilities and entropies, values, or rewards of given rows.

Shapes: B rows, S sequence, T response.
"""

import dataclasses
import enum
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.layout import DP
from nereus_jax.models.decoder import Decoder, bind, decoder_graphdef
from nereus_jax.models.forward import final_scores, response_logprobs, response_values
from nereus_jax.models.mesh_axes import SHARDED
from nereus_jax.runtime import host
from nereus_jax.runtime.emu import Params, Site, partition_spec
from nereus_jax.runtime.engines.rows import RowSplit, split_rows
from nereus_jax.runtime.programs import Program, ProgramCache, ProgramKey

FLUSH_PER_RANK = 4
"""Microbatches of a flush per pipeline rank: a bubble below 1/5, a bounded buffer."""


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
      microbatch_size: rows of a replica that are in the layers at a time.
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

    def split(self, num_rows: int) -> RowSplit:
        """How a batch of this many rows is cut."""
        layout = self.site.placement.layout
        return split_rows(num_rows, layout, self.microbatch_size, FLUSH_PER_RANK * layout.pp)

    def program(self, num_rows: int, length: int, width: int) -> Program:
        """The compiled program for a batch of rows [B, S] with responses of at most T."""
        split = self.split(num_rows)
        key = ProgramKey.of(self.site, self, "score", split, length, width)
        return self.programs.get(key, lambda: self._lower(split, length, width))

    def dispatch(
        self,
        params: Params,
        tokens_BS: np.ndarray,
        prompt_lengths_B: np.ndarray,
        total_lengths_B: np.ndarray,
        width: int,
    ) -> Mapping[str, jax.Array]:
        """Starts a pass; the arrays hold the padded rows.

        Args:
          params: the model's arrays on this site.
          tokens_BS: right-padded rows, prompt then response.
          prompt_lengths_B: length of each prompt.
          total_lengths_B: length of prompt and response together.
          width: T, the columns of the response-aligned outputs.
        """
        split = self.split(tokens_BS.shape[0])
        arrays = split.pad(
            {
                "tokens": tokens_BS.astype(np.int32),
                "prompt_lengths": prompt_lengths_B.astype(np.int32),
                "total_lengths": total_lengths_B.astype(np.int32),
            }
        )
        program = self.program(tokens_BS.shape[0], tokens_BS.shape[1], width)
        rows = self.site.sharding((DP,))
        return program.run(params, {name: host.put(x, rows) for name, x in arrays.items()})

    def _outputs(self, decoder: Decoder, batch: Params, width: int) -> dict[str, jax.Array]:
        """One pipeline flush: leaves [M, B, ...] in, rows [M * B, ...] out."""
        tokens, prompt_lengths = batch["tokens"], batch["prompt_lengths"]
        if self.kind is ScoreKind.VALUES:
            return {"values": response_values(decoder, tokens, prompt_lengths, width=width)}
        if self.kind is ScoreKind.REWARDS:
            return {"rewards": final_scores(decoder, tokens, batch["total_lengths"])}
        logprobs, entropy = response_logprobs(
            decoder,
            tokens,
            prompt_lengths,
            width=width,
            temperature=self.temperature,
            token_chunk=self.token_chunk,
        )
        return {"logprobs": logprobs, "entropy": entropy}

    def _lower(self, split: RowSplit, length: int, width: int) -> jax.stages.Lowered:
        spec = self.config.spec(self.head, self.dtype)
        graphdef = decoder_graphdef(self.config, self.head, SHARDED)

        def score(params: Params, batch: Params) -> dict[str, jax.Array]:
            decoder = bind(graphdef, params)
            return map_flushes(lambda part: self._outputs(decoder, part, width), batch, split)

        mapped = jax.shard_map(
            score,
            mesh=self.site.mesh,
            in_specs=(
                {leaf.name: partition_spec(leaf, spec.rules) for leaf in spec},
                PartitionSpec(DP),
            ),
            out_specs=PartitionSpec(DP),
        )
        rows = self.site.sharding((DP,))
        shapes = {"tokens": (length,), "prompt_lengths": (), "total_lengths": ()}
        batch = {
            name: jax.ShapeDtypeStruct((split.padded_rows, *shape), jnp.int32, sharding=rows)
            for name, shape in shapes.items()
        }
        with jax.default_matmul_precision(self.precision):
            return jax.jit(mapped).lower(self.site.abstract(spec), batch)


def map_flushes(
    function: Callable[[Params], dict[str, jax.Array]], batch: Params, split: RowSplit
) -> dict[str, jax.Array]:
    """Applies `function` to one flush [M, B, ...] after the other; joins the rows that it
    returns."""
    flushes = to_flushes(batch, split)
    if split.flushes == 1:
        return function(jax.tree.map(lambda x: x[0], flushes))
    outputs = lax.map(function, flushes)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)


def to_flushes(batch: Params, split: RowSplit) -> Params:
    """The rows of a replica as [flushes, microbatches, microbatch_size, ...]."""
    shape = (split.flushes, split.microbatches, split.microbatch_size)
    return {name: x.reshape(*shape, *x.shape[1:]) for name, x in batch.items()}
