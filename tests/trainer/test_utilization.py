"""Model FLOPs of a step, against numbers worked out by hand."""

import numpy as np

from nereus_jax.core.architectures import DecoderConfig
from nereus_jax.trainer.utilization import model_flops


def test_flops_by_hand() -> None:
    model = DecoderConfig(
        num_layers=2,
        embed_dim=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        mlp_dim=16,
        vocab_size=32,
        max_positions=64,
    )
    # A layer: q and o 8 x 8, k and v 8 x 4, three matrices of the MLP 8 x 16.
    layer = 2 * 64 + 2 * 32 + 3 * 128
    # Rows of 3 + 2 and 1 + 3 tokens; the first attends to 1 + 2 + 3 + 4 + 5 positions.
    tokens, attended, responses = 5 + 4, 15 + 10, 2 + 3
    layers = 2 * (2 * layer * tokens + 4 * attended * 8)
    head = 2 * responses * 32 * 8
    rows = np.array([3, 1]), np.array([2, 3])
    np.testing.assert_allclose(model_flops(model, *rows, scalar=False), layers + head)
    np.testing.assert_allclose(model_flops(model, *rows, scalar=True), layers)
