"""How many arrays of each kind XLA holds at a time: what the memory model multiplies terms with.

Learned from compiled programs by `benchmarks/memory_model/fit.py`, which prints the table below.
The terms that are not here (what layers keep for the backward pass, the KV cache) count once.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainCoefficients:
    """Of an update; each is a number of arrays of its kind.

    Attributes:
      gradients: of the layers, in the dtype of the parameters.
      vocab_gradients: the same of embedding, head and what else is outside of them.
      accumulated: more of them where several flushes add up.
      piped: more of them with a pipeline, whose ticks add up.
      running: ticks whose kept arrays exist beside those of all ticks, with a pipeline.
      recomputed: of what a layer keeps, where it is recomputed.
      scores: attention scores, beside those that are kept.
      streams: [tokens, D] of a microbatch.
      layer_weights: of one layer.
      logits: of one chunk.
      head_weight: the vocabulary projection in float32.
      ticks: [tokens, D] of all ticks of a pipeline flush.
      flush: [tokens, D] of all microbatches of a pipeline flush.
    """

    gradients: float
    vocab_gradients: float
    accumulated: float
    piped: float
    running: float
    recomputed: float
    scores: float
    streams: float
    layer_weights: float
    logits: float
    head_weight: float
    ticks: float
    flush: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreCoefficients:
    """Of a SCORE pass; attention and feed-forward do not run at the same time.

    Attributes:
      scores: attention scores.
      many_scores: more of them in large softmaxes (`Terms.many_scores`).
      blocks: queries of a microbatch, where attention goes block by block.
      mlp: [tokens, F] of a microbatch.
      mlp_streams: [tokens, D] beside them.
      streams: [tokens, D] throughout.
      layer_weights: of one layer.
      hidden: [tokens, D] of a flush, while logits are computed.
      piped_hidden: the same with a pipeline, beside `flush`.
      logits: of one chunk.
      whole_logits: more of them where one chunk is all.
      head_weight: the vocabulary projection in float32.
      flush: [tokens, D] of all microbatches of a pipeline flush.
      ticks: [tokens, D] of all ticks of it, while its layers run.
    """

    scores: float
    many_scores: float
    blocks: float
    mlp: float
    mlp_streams: float
    streams: float
    layer_weights: float
    hidden: float
    piped_hidden: float
    logits: float
    whole_logits: float
    head_weight: float
    flush: float
    ticks: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateCoefficients:
    """Of generation; prefill and decode steps do not run at the same time.

    Attributes:
      refilled_cache: more of the KV cache where rows wait for slots, beside the one that counts.
      layer_weights: of one layer.
      scores: attention scores of a prefill microbatch.
      many_scores: more of them in large softmaxes (`memory_terms.MANY_SOFTMAXES`).
      mlp: [tokens, F] of it.
      streams: [tokens, D] of it.
      prompt_cache: its keys and values, all layers.
      cache_read: keys and values of one layer that a decode step reads.
      logits: of a decode step.
      responses: tokens and log-probabilities of all replicas, which are gathered at the end.
    """

    refilled_cache: float
    layer_weights: float
    scores: float
    many_scores: float
    mlp: float
    streams: float
    prompt_cache: float
    cache_read: float
    logits: float
    responses: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coefficients:
    """Of one backend.

    Attributes:
      reserved_bytes: of a device, what the backend itself takes: its context, its communicators.
    """

    train: TrainCoefficients
    score: ScoreCoefficients
    generate: GenerateCoefficients
    reserved_bytes: float


COEFFICIENTS: Mapping[str, Coefficients] = {
    "cpu": Coefficients(
        train=TrainCoefficients(
            gradients=1.626,
            vocab_gradients=1.191,
            accumulated=0.463,
            piped=0.032,
            running=1.342,
            recomputed=0.300,
            scores=3.026,
            streams=2.870,
            layer_weights=2.463,
            logits=3.811,
            head_weight=0.045,
            ticks=2.943,
            flush=0.512,
        ),
        score=ScoreCoefficients(
            scores=2.084,
            many_scores=0.980,
            blocks=2.568,
            mlp=1.145,
            mlp_streams=1.716,
            streams=1.172,
            layer_weights=0.878,
            hidden=0.795,
            piped_hidden=0.795,
            logits=1.449,
            whole_logits=0.200,
            head_weight=0.556,
            flush=2.266,
            ticks=0.000,
        ),
        generate=GenerateCoefficients(
            refilled_cache=0.000,
            layer_weights=0.841,
            scores=2.206,
            many_scores=0.853,
            mlp=3.375,
            streams=2.405,
            prompt_cache=0.213,
            cache_read=0.969,
            logits=2.224,
            responses=0.293,
        ),
        reserved_bytes=0.0,
    ),
    "gpu": Coefficients(
        train=TrainCoefficients(
            gradients=0.979,
            vocab_gradients=0.507,
            accumulated=0.974,
            piped=0.944,
            running=0.598,
            recomputed=0.497,
            scores=0.995,
            streams=0.996,
            layer_weights=0.494,
            logits=1.017,
            head_weight=1.077,
            ticks=1.009,
            flush=0.703,
        ),
        score=ScoreCoefficients(
            # Small microbatches say little of what a layer works with: these follow from what must
            # be there, float32 scores with bfloat16 weights beside them, queries and output, the
            # stream, one layer's weights; seven programs of 8 to 64 rows bear them out. So do the
            # rows of a pipeline flush, and beside them what every tick gives while its layers run.
            scores=1.500,
            many_scores=0.000,
            blocks=2.000,
            mlp=1.580,
            mlp_streams=1.938,
            streams=1.000,
            layer_weights=1.000,
            hidden=1.000,
            piped_hidden=0.000,
            logits=2.162,
            whole_logits=0.200,
            head_weight=1.216,
            flush=1.000,
            ticks=1.000,
        ),
        generate=GenerateCoefficients(
            refilled_cache=0.914,
            layer_weights=0.343,
            scores=2.326,
            many_scores=0.000,
            mlp=2.000,
            streams=2.230,
            prompt_cache=1.238,
            cache_read=1.000,
            logits=2.000,
            responses=1.002,
        ),
        reserved_bytes=1.0 * 2**30,
    ),
}
