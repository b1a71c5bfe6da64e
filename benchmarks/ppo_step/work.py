"""The work that every program of this benchmark does: its sizes, prompts, reward and FLOPs.

Standard library only, since the peers' interpreters import it too.
"""

import dataclasses
import random

PAD, BOS, EOS = 0, 1, 2
FIRST_PROMPT_TOKEN = 3
"""Prompts hold no special token but the first, BOS."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """A Llama-like model, and the batch of one PPO step.

    The model: RMSNorm (eps 1e-5), RoPE (theta 10000), SwiGLU, no biases, untied head, float32,
    without recomputation. The critic has a scalar head.
    """

    num_layers: int = 4
    embed_dim: int = 256
    num_heads: int = 8
    head_dim: int = 32
    mlp_dim: int = 1024
    vocab_size: int = 2048
    batch_size: int = 32
    prompt_length: int = 32
    response_length: int = 64
    epochs: int = 2

    @property
    def row_length(self) -> int:
        """Tokens of prompt and response together."""
        return self.prompt_length + self.response_length


FULL = Sizes()
QUICK = Sizes(
    num_layers=2,
    embed_dim=32,
    num_heads=8,
    head_dim=8,
    mlp_dim=64,
    vocab_size=128,
    batch_size=8,
    prompt_length=8,
    response_length=8,
)
"""Small enough for a test."""

LEARNING_RATE = 1e-4
CLIP = VALUE_CLIP = 0.2
GAMMA = 1.0
GAE_LAMBDA = 0.95
KL_COEF = 0.05


def sizes_of(name: str) -> Sizes:
    """The sizes named on a command line: `full` or `quick`."""
    return {"full": FULL, "quick": QUICK}[name]


def prompts(sizes: Sizes, steps: int, seed: int = 0) -> list[list[int]]:
    """Prompts for so many steps: BOS, then uniform tokens; all of one length."""
    rng = random.Random(seed)
    length, vocab = sizes.prompt_length - 1, sizes.vocab_size
    return [
        [BOS, *(rng.randrange(FIRST_PROMPT_TOKEN, vocab) for _ in range(length))]
        for _ in range(steps * sizes.batch_size)
    ]


def reward(sizes: Sizes, response: list[int]) -> int:
    """Tokens of the response from the lower half of the vocabulary, less half its length.

    A whole number, because Tunix 0.1.7 cuts rewards to integers.
    """
    low = sum(token < sizes.vocab_size // 2 for token in response)
    return low - sizes.response_length // 2


def check_responses(sizes: Sizes, responses: list[list[int]]) -> None:
    """Every program has to generate the whole work.

    Raises:
      ValueError: a response ended early.
    """
    lengths = {len(response) for response in responses}
    if len(responses) != sizes.batch_size or lengths != {sizes.response_length}:
        raise ValueError(
            f"expected {sizes.batch_size} responses of {sizes.response_length} tokens, got "
            f"{len(responses)} of {sorted(lengths)}"
        )


def forward_flops(sizes: Sizes, *, vocabulary: bool) -> float:
    """FLOPs of one forward pass over a batch of whole rows, a multiply-add counted as two.

    Per layer and token: 2 * (4 D H K + 3 D F) for the matrices, and 4 H K times the mean number of
    positions attended to, (S + 1) / 2, for scores and weighted sum: what a causal model needs,
    whether or not a program computes the masked half too. The vocabulary projection is counted for
    the response's tokens only, 2 V D each; a scalar head is not counted.
    """
    width = sizes.num_heads * sizes.head_dim
    tokens = sizes.batch_size * sizes.row_length
    matrices = 2 * (4 * sizes.embed_dim * width + 3 * sizes.embed_dim * sizes.mlp_dim)
    attention = 4 * width * (sizes.row_length + 1) / 2
    layers = float(tokens * sizes.num_layers * (matrices + attention))
    if not vocabulary:
        return layers
    head_tokens = sizes.batch_size * sizes.response_length
    return layers + 2.0 * head_tokens * sizes.vocab_size * sizes.embed_dim


def train_flops(sizes: Sizes) -> float:
    """FLOPs of the TRAIN passes of a step: actor and critic, each epoch forward and backward.

    The backward pass counts twice the forward one.
    """
    forward = forward_flops(sizes, vocabulary=True) + forward_flops(sizes, vocabulary=False)
    return 3.0 * sizes.epochs * forward
