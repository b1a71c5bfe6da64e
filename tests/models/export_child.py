"""One of two processes with four devices each that export together:
`export_child.py COORDINATOR PROCESS_ID DIRECTORY`.

Makes `spanning/` from arrays over both processes and `second/` from arrays that only the second one
holds, and tries to write to `file/...`, which the first one cannot. Prints the error of that.
"""

import pathlib
import sys

import numpy as np

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.errors import StorageError
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement
from nereus_jax.core.roles import ACTOR_TRAIN
from nereus_jax.models.huggingface import export_model
from nereus_jax.runtime import emu
from nereus_jax.runtime.membership import DistributedConfig
from nereus_jax.runtime.world import form_world

CONFIG = DecoderConfig(
    num_layers=3,
    embed_dim=12,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=18,
    vocab_size=51,
    qkv_bias=True,
)


def leaves() -> dict[str, np.ndarray]:
    """Values with every bit of a number, and negative zeros."""
    rng = np.random.default_rng(0)
    made = {x.name: rng.normal(size=x.shape).astype(np.float32) for x in CONFIG.spec(Head.LM)}
    for value in made.values():
        value.reshape(-1)[::5] = -0.0
    return made


def main(coordinator: str, process_id: int, directory: pathlib.Path) -> None:
    job = DistributedConfig(
        enabled=True, coordinator=coordinator, num_processes=2, process_id=process_id
    )
    world, values = form_world(job, emulated_devices=4), leaves()

    def params(layout: ParallelLayout, first: int) -> emu.Params:
        devices = world.pool.devices[first : first + layout.num_devices]
        placement = Placement(layout=layout, devices=devices)
        site = emu.make_site(world, ACTOR_TRAIN, placement, CONFIG.num_kv_heads)
        return emu.load(CONFIG.spec(Head.LM), site, lambda name, index: values[name][index])

    spanning = params(ParallelLayout(1, 4, 2), 0)
    export_model(directory / "spanning", CONFIG, spanning, max_file_bytes=3000)
    export_model(directory / "second", CONFIG, params(ParallelLayout(1, 2, 2), 4))
    try:
        export_model(directory / "file" / "x", CONFIG, spanning)
    except StorageError as error:
        print(error)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3]))
