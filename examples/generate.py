"""Generates and scores with one model under two layouts, without trainer or configuration file.

python examples/generate.py
"""

import numpy as np

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement
from nereus_jax.core.roles import ACTOR_GENERATE
from nereus_jax.models.sampling import SamplingConfig
from nereus_jax.runtime import emu, host
from nereus_jax.runtime.engines.generate import GenerateEngine
from nereus_jax.runtime.programs import ProgramCache
from nereus_jax.runtime.world import form_world


def main() -> None:
    """Prints the responses under one device and under four."""
    world = form_world(emulated_devices=4)
    model = DecoderConfig(
        num_layers=3, embed_dim=64, num_heads=6, num_kv_heads=3, head_dim=16, mlp_dim=128,
        vocab_size=100,
    )  # fmt: skip
    prompts_BP = np.array([[5, 6, 7, 0], [8, 9, 10, 11]])
    lengths_B, samples_B = np.array([3, 4]), np.arange(2)
    for layout in (ParallelLayout(dp=1, pp=1, tp=1), ParallelLayout(dp=1, pp=2, tp=2)):
        devices = world.pool.devices[: layout.num_devices]
        placement = Placement(layout=layout, devices=devices)
        site = emu.make_site(world, ACTOR_GENERATE, placement, model.num_kv_heads)
        params = emu.initialize(model, Head.LM, site, "float32", seed=0)
        engine = GenerateEngine(
            config=model,
            site=site,
            dtype="float32",
            prefill_rows=8,
            precision="highest",
            programs=ProgramCache(),
        )
        sampling = SamplingConfig(max_tokens=8)
        outputs = engine.dispatch(params, prompts_BP, lengths_B, samples_B, 0, sampling)
        tokens_BT = host.fetch(outputs)["tokens"][: len(prompts_BP)]
        print(f"{layout}: {tokens_BT.tolist()}")


if __name__ == "__main__":
    main()
