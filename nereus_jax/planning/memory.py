# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""The memory model: bytes of a model-stage on each of its devices, by kind, for many candidates.

State and arguments are exact. What a program needs on top while it runs follows from the shapes of
what it keeps (`memory_terms`), and from coefficients that say how many such arrays XLA holds at a
time: one set for each backend, learned from compiled programs (`benchmarks/memory_model`). A
measured peak corrects them further. Everything here is modelled, and nothing is allocated.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.roles import ModelStage, Stage
from nereus_jax.planning.candidates import Bools, Candidates
from nereus_jax.planning.memory_coefficients import COEFFICIENTS, Coefficients
from nereus_jax.planning.memory_decode import decode_bytes
from nereus_jax.planning.memory_state import Floats, state_bytes
from nereus_jax.planning.memory_terms import EngineOptions, HeadTerms, Terms
from nereus_jax.planning.transfers import MAX_INFLIGHT_BYTES
from nereus_jax.planning.workload import Workload

PLACED_ARRAYS = 3
"""Float32 arrays that an objective reads beside the tokens: weights, old log-probabilities or
values, advantages or returns."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StageMemory:
    """Bytes of a model-stage on each of its devices, [C] each, modelled.

    Attributes:
      parameters: weights.
      optimizer: moments and counters.
      inputs: arguments of a program beside the state.
      results: what it returns that takes no argument's place.
      gradients: of a program at its peak, as all that follows.
      activations: what layers keep, and what one layer works with.
      logits: of a chunk, with what is computed from it.
      kv_cache: keys and values of the rows that are decoded.
      buffers: what a weight edge has in flight beyond what the programs work with.
    """

    parameters: Floats
    optimizer: Floats
    inputs: Floats
    results: Floats
    gradients: Floats
    activations: Floats
    logits: Floats
    kv_cache: Floats
    buffers: Floats

    @functools.cached_property
    def held_bytes(self) -> Floats:
        """[C] what stays between the programs."""
        return self.parameters + self.optimizer

    @property
    def argument_bytes(self) -> Floats:
        """[C] what the largest program is given."""
        return self.held_bytes + self.inputs

    @property
    def temporary_bytes(self) -> Floats:
        """[C] what it needs on top."""
        return self.gradients + self.activations + self.logits + self.kv_cache

    @functools.cached_property
    def working_bytes(self) -> Floats:
        """[C] what is needed on top of the held bytes while it runs."""
        return self.inputs + self.results + self.temporary_bytes + self.buffers

    def with_edge(self) -> "StageMemory":
        """The same for a model-stage at either end of a weight edge."""
        in_flight = np.minimum(self.parameters, MAX_INFLIGHT_BYTES)
        more = np.maximum(in_flight - self.working_bytes, 0.0)
        return dataclasses.replace(self, buffers=self.buffers + more)

    def take(self, mask: Bools) -> "StageMemory":
        """Of the candidates where a mask [C] is set."""
        kinds = {f.name: getattr(self, f.name)[mask] for f in dataclasses.fields(self)}
        return StageMemory(**kinds)

    def at(self, index: int) -> dict[str, float]:
        """The bytes of one candidate by kind, without what is not there."""
        kinds = {f.name: float(getattr(self, f.name)[index]) for f in dataclasses.fields(self)}
        return {kind: size for kind, size in kinds.items() if size > 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """How programs use memory on a backend.

    Attributes:
      coefficients: of the backend.
      corrections: by stage, what temporaries are multiplied with after peaks were measured.
      options: of the engines.
    """

    coefficients: Coefficients = COEFFICIENTS["gpu"]
    corrections: Mapping[Stage, float] = dataclasses.field(default_factory=dict[Stage, float])
    options: EngineOptions = dataclasses.field(default_factory=EngineOptions)

    @property
    def reserved_bytes(self) -> float:
        """Of a device, before any model: what the backend and its communicators take."""
        return self.coefficients.reserved_bytes

    def terms(
        self,
        model: DecoderConfig,
        stage: Stage,
        workload: Workload,
        candidates: Candidates,
        *,
        param_dtype: str = "float32",
        compute_dtype: str = "bfloat16",
    ) -> Terms:
        """What all heads of a model share in the bytes of a stage; arguments as `stage_memory`."""
        return Terms(
            model=model,
            workload=workload,
            candidates=candidates,
            param_dtype=param_dtype if stage is Stage.TRAIN else compute_dtype,
            compute_dtype=compute_dtype,
            options=self.options,
        )

    def stage_memory(
        self,
        model: DecoderConfig,
        head: Head,
        model_stage: ModelStage,
        workload: Workload,
        candidates: Candidates,
        *,
        param_dtype: str = "float32",
        compute_dtype: str = "bfloat16",
    ) -> StageMemory:
        """The bytes of a model-stage.

        Args:
          model: its sizes.
          head: what it ends in.
          model_stage: which.
          workload: of a step.
          candidates: layouts, microbatches and memory choices.
          param_dtype: of the master weights and moments of TRAIN.
          compute_dtype: of activations, and of the weights of GENERATE and SCORE.
        """
        terms = self.terms(
            model,
            model_stage.stage,
            workload,
            candidates,
            param_dtype=param_dtype,
            compute_dtype=compute_dtype,
        )
        return self.head_memories(terms, model_stage.stage, (head,))[head]

    def head_memories(
        self, terms: Terms, stage: Stage, heads: Iterable[Head]
    ) -> dict[Head, StageMemory]:
        """The bytes of a stage of a model with each of some heads; `terms`: of the model."""
        own = {head: HeadTerms(terms=terms, head=head) for head in heads}
        c = self.coefficients
        if stage is Stage.TRAIN:
            layers = _train_layers(terms, c)
            parts = {head: _train_bytes(x, layers, c) for head, x in own.items()}
        elif stage is Stage.SCORE:
            layers = _score_layers(terms, c)
            parts = {head: _score_bytes(x, layers, c) for head, x in own.items()}
        else:
            parts = {head: decode_bytes(x, c) for head, x in own.items()}
        return {head: self._memory(x, stage, parts[head]) for head, x in own.items()}

    def _memory(self, own: HeadTerms, stage: Stage, parts: Mapping[str, Floats]) -> StageMemory:
        terms, candidates = own.terms, own.terms.candidates
        state = state_bytes(
            own.spec,
            terms.param_dtype,
            candidates,
            terms.shards,
            train=stage is Stage.TRAIN,
            elements=own.elements,
        )
        nothing = np.zeros(len(candidates))
        factor = self.corrections.get(stage, 1.0)
        kinds = {
            kind: factor * parts.get(kind, nothing)
            for kind in ("gradients", "activations", "logits", "kv_cache")
        }
        return StageMemory(
            parameters=state.parameters,
            optimizer=state.optimizer,
            inputs=parts["inputs"],
            results=parts.get("results", nothing),
            buffers=nothing,
            **kinds,
        )

    def corrected(
        self, stage: Stage, predicted_bytes: float, measured_bytes: float
    ) -> "MemoryModel":
        """Learns from a measured peak of temporaries.

        A peak above the prediction counts at once and in full, because the next step may need it;
        one below moves the correction half way, because what was measured may not be the worst.

        Args:
          stage: whose program it was.
          predicted_bytes: temporaries as this model has them, corrections included; above 0.
          measured_bytes: what they were.
        """
        ratio = measured_bytes / predicted_bytes
        factor = ratio if ratio > 1.0 else ratio**0.5
        old = self.corrections.get(stage, 1.0)
        return dataclasses.replace(self, corrections={**self.corrections, stage: old * factor})


class _LayerBytes(NamedTuple):
    """What a program works with in the layers, whatever the model ends in, [C] each.

    Attributes:
      kept: throughout.
      layer: of one layer, beside that.
      hidden: of the hidden states, while logits are computed.
    """

    kept: Floats
    layer: Floats
    hidden: Floats | float


def _train_layers(terms: Terms, coefficients: Coefficients) -> _LayerBytes:
    c = coefficients.train
    recomputed = np.where(terms.candidates.remat, c.recomputed * terms.kept_by_layer, 0.0)
    layer = recomputed + c.scores * terms.scores + c.streams * terms.stream
    layer = layer + c.layer_weights * terms.layer_weight_bytes
    kept = terms.kept + np.where(terms.piped, c.running * terms.kept_in_a_tick, 0.0)
    kept = kept + c.ticks * terms.tick_stream + c.flush * terms.flush_stream
    return _LayerBytes(kept=kept, layer=layer, hidden=0.0)


def _train_bytes(
    own: HeadTerms, layers: _LayerBytes, coefficients: Coefficients
) -> dict[str, Floats]:
    c, terms = coefficients.train, own.terms
    more = np.where(terms.candidates.accumulation > 1, c.accumulated, 0.0)
    more = more + np.where(terms.piped, c.piped, 0.0)
    of_layers, rest = terms.layers_bytes, own.param_bytes - terms.layers_bytes
    if terms.options.unrolled_train:
        more = more + 2.0 * of_layers / own.param_bytes
    gradients = c.gradients * of_layers + c.vocab_gradients * rest + more * own.param_bytes
    logits = c.logits * own.logits + c.head_weight * own.head_weight
    return {
        "inputs": own.input_bytes(PLACED_ARRAYS),
        "gradients": gradients,
        **_larger(layers, logits),
    }


def _score_layers(terms: Terms, coefficients: Coefficients) -> _LayerBytes:
    c = coefficients.score
    blocks = c.blocks * terms.queries if terms.in_blocks else 0.0
    attention = c.scores * terms.scores + c.many_scores * terms.many_scores + blocks
    mlp = c.mlp * terms.mlp + c.mlp_streams * terms.stream
    layer = np.maximum(attention, mlp) + c.streams * terms.stream
    layer = layer + c.layer_weights * terms.layer_weight_bytes
    hidden = np.where(terms.piped, c.piped_hidden, c.hidden) * terms.stream
    hidden = hidden * terms.candidates.microbatches
    layer = layer + c.ticks * terms.tick_stream
    return _LayerBytes(kept=c.flush * terms.flush_stream, layer=layer, hidden=hidden)


def _score_bytes(
    own: HeadTerms, layers: _LayerBytes, coefficients: Coefficients
) -> dict[str, Floats]:
    c = coefficients.score
    copies = c.logits + np.where(own.chunked, 0.0, c.whole_logits)
    logits = layers.hidden + copies * own.logits + c.head_weight * own.head_weight
    return {
        "inputs": own.input_bytes(0),
        "results": own.output_bytes(2 if own.head is Head.LM else 1),
        **_larger(layers, logits),
    }


def _larger(layers: _LayerBytes, logits: Floats) -> dict[str, Floats]:
    """Passes of the head and of the layers do not run at the same time: the larger one counts."""
    in_layers = layers.layer >= logits
    return {
        "activations": layers.kept + np.where(in_layers, layers.layer, 0.0),
        "logits": np.where(in_layers, 0.0, logits),
    }
