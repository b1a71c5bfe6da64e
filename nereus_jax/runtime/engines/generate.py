"""The GENERATE engine: prompts in, sampled responses and their log-probabilities out.

Shapes: B rows, N rows of all replicas with those that only fill up, P prompt, T response.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.layout import DP
from nereus_jax.models.decode_state import Rows
from nereus_jax.models.decoder import bind, decoder_graphdef, unstack_layers
from nereus_jax.models.generate import Generator
from nereus_jax.models.kv_cache import PagePool
from nereus_jax.models.mesh_axes import SHARDED
from nereus_jax.models.sampling import SamplingConfig
from nereus_jax.runtime import host
from nereus_jax.runtime.emu import Params, Site, partition_spec
from nereus_jax.runtime.programs import Program, ProgramCache, ProgramKey, Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateEngine:
    """Generates with one actor on one site.

    Attributes:
      config: the model.
      site: where it lives.
      dtype: of its weights and its KV cache.
      prefill_rows: most prompts of a replica that are in the layers at a time.
      precision: of matrix products, a `jax.default_matmul_precision` name.
      max_num_seqs: rows of a replica that are decoded at a time, each with a place in the KV cache;
        others wait for a row to end; 0: all.
      kv_cache_tokens: positions of a replica's KV cache; 0: room for every slot's longest row.
        With less than that it is handed out in pages, and rows wait for pages too.
      kv_page_tokens: positions of a page.
      unroll: the layers follow each other in a decode step without a loop, on a second set of
        weights.
      programs: where compiled programs are kept.
    """

    config: DecoderConfig
    site: Site
    dtype: str
    prefill_rows: int
    precision: str
    max_num_seqs: int = 0
    kv_cache_tokens: int = 0
    kv_page_tokens: int = 32
    unroll: bool = False
    programs: ProgramCache = dataclasses.field(compare=False)

    def __post_init__(self) -> None:
        self.config.check_layout(self.site.placement.layout)

    def slots(self, num_rows: int) -> int:
        """Rows of a replica that are decoded at a time.

        They form pp equal groups, each a whole number of prefill microbatches.
        """
        layout = self.site.placement.layout
        rows = -(-num_rows // layout.dp)
        per_group = -(-min(rows, self.max_num_seqs or rows) // layout.pp)
        micro = min(per_group, self.prefill_rows)
        return layout.pp * micro * -(-per_group // micro)

    def padded_rows(self, num_rows: int) -> int:
        """Rows of the compiled batch: as many for every replica, at least one for each slot."""
        dp = self.site.placement.layout.dp
        return dp * max(-(-num_rows // dp), self.slots(num_rows))

    def page_pool(self, slots: int, longest_row: int) -> PagePool | None:
        """The pages of a replica's KV cache; None where every slot's longest row has room.

        Raises:
          InfeasiblePlanError: the longest row has no room.
        """
        if not self.kv_cache_tokens or self.kv_cache_tokens >= slots * longest_row:
            return None
        num_pages = self.kv_cache_tokens // self.kv_page_tokens
        pool = PagePool(num_pages=num_pages, page_tokens=self.kv_page_tokens)
        needed = pool.pages(longest_row)
        if num_pages < needed:
            raise InfeasiblePlanError(
                f"a KV cache of {self.kv_cache_tokens} tokens has {num_pages} pages of "
                f"{self.kv_page_tokens}, the longest row of {longest_row} tokens takes {needed}; "
                f"raise kv_cache_tokens to at least {needed * self.kv_page_tokens}, or set it to 0 "
                f"for a cache with room for every row's maximum"
            )
        return pool

    def program(self, num_rows: int, prompt_width: int, sampling: SamplingConfig) -> Program:
        """The compiled program for a batch of this shape."""
        return self.programs.get(*self.recipe(num_rows, prompt_width, sampling))

    def recipe(self, num_rows: int, prompt_width: int, sampling: SamplingConfig) -> Recipe:
        """How the program for a batch of this shape is made."""
        rows = self.padded_rows(num_rows)
        slots = self.slots(num_rows)
        key = ProgramKey.of(self.site, self, "generate", rows, slots, prompt_width, sampling)
        return key, lambda: self._lower(rows, slots, prompt_width, sampling)

    def dispatch(
        self,
        params: Params,
        tokens_BP: np.ndarray,
        prompt_lengths_B: np.ndarray,
        sample_indices_B: np.ndarray,
        seed: int,
        sampling: SamplingConfig,
        limits_B: np.ndarray | None = None,
    ) -> Mapping[str, jax.Array]:
        """Starts generation; the arrays hold the padded rows, which the caller cuts.

        Rows are dealt to the replicas by prompt length, and come back in the caller's order.

        Args:
          params: the model's arrays on this site.
          tokens_BP: right-padded prompts.
          prompt_lengths_B: their lengths.
          sample_indices_B: global sample counters below 2^32, which with `seed` name the draws.
          seed: 0 <= seed < 2^32.
          sampling: how tokens are drawn.
          limits_B: most tokens of each response, 1 to T; None: T for all.

        Returns:
          tokens [B, T], logprobs [B, T], lengths [B], finished [B], and the counters of `Effort`,
          one entry a replica.
        """
        num_rows, width = tokens_BP.shape
        missing = self.padded_rows(num_rows) - num_rows
        lengths_N = np.pad(prompt_lengths_B, (0, missing))
        order_N = deal(lengths_N, self.site.placement.layout.dp)
        no_limits_B = np.full(num_rows, sampling.max_tokens)
        arrays = [
            np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))[order_N]
            for x in (
                tokens_BP.astype(np.int32),
                prompt_lengths_B.astype(np.int32),
                sample_indices_B.astype(np.uint32),
                (no_limits_B if limits_B is None else limits_B).astype(np.int32),
            )
        ]
        places_N = np.argsort(order_N).astype(np.int32)
        by_row = self.site.sharding((DP,))
        arguments = [host.put(x, by_row) for x in (*arrays, places_N)]
        seed_array = host.put(np.asarray(seed, np.uint32), self.site.sharding())
        recipe = self.recipe(num_rows, width, sampling)
        return self.programs.run(recipe, params, *arguments, seed_array)

    def _lower(
        self, rows: int, slots: int, prompt_width: int, sampling: SamplingConfig
    ) -> jax.stages.Lowered:
        spec = self.config.spec(Head.LM, self.dtype)
        graphdef = decoder_graphdef(self.config, Head.LM, SHARDED)
        pool = self.page_pool(slots, prompt_width + sampling.max_tokens)

        def generate(
            params: Params,
            tokens_NP: jax.Array,
            prompt_lengths_N: jax.Array,
            sample_indices_N: jax.Array,
            limits_N: jax.Array,
            places_N: jax.Array,
            seed: jax.Array,
        ) -> dict[str, jax.Array]:
            layers = unstack_layers(params)[1] if self.unroll else None
            decoder = bind(graphdef, params)
            generator = Generator(decoder, sampling, self.prefill_rows, slots, pool, layers)
            rows = Rows(tokens_NP, prompt_lengths_N, sample_indices_N, limits_N)
            responses, effort = generator(rows, seed)
            whole = lax.all_gather(responses, DP, tiled=True)
            returned = {name: x[places_N] for name, x in whole._asdict().items()}
            return returned | {name: x[None] for name, x in effort._asdict().items()}

        by_row = PartitionSpec(DP)
        mapped = jax.shard_map(
            generate,
            mesh=self.site.mesh,
            in_specs=(
                {leaf.name: partition_spec(leaf, spec.rules) for leaf in spec},
                *[by_row] * 5,
                PartitionSpec(),
            ),
            out_specs=by_row,
            check_vma=False,
        )
        row_sharding = self.site.sharding((DP,))
        shapes = [(rows, prompt_width), *[(rows,)] * 4]
        dtypes = [jnp.int32, jnp.int32, jnp.uint32, jnp.int32, jnp.int32]
        abstract = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=row_sharding)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        seed = jax.ShapeDtypeStruct((), jnp.uint32, sharding=self.site.sharding())
        with jax.default_matmul_precision(self.precision):
            return jax.jit(mapped).lower(self.site.abstract(spec), *abstract, seed)


def deal(lengths_N: np.ndarray, dp: int) -> np.ndarray:
    """An order of rows [N], replica after replica, each with its rows from long to short prompts.

    The rows go round the replicas there and back, so that all get prompts of about the same length,
    and rows without a prompt come last everywhere.
    """
    by_length = np.argsort(-lengths_N, kind="stable").reshape(-1, dp)
    by_length[1::2] = by_length[1::2, ::-1]
    return by_length.T.reshape(-1)
