"""Models on their way between files and meshes: any layout, several files, never a whole copy."""

import json
import math
import pathlib
import tracemalloc
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from nereus_jax.core.architectures import DecoderConfig, Head, Llama3Rope
from nereus_jax.core.errors import ConfigError, DataError, StorageError
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement
from nereus_jax.core.roles import ACTOR_TRAIN
from nereus_jax.models import safetensors_file
from nereus_jax.models.gather import read_slice
from nereus_jax.models.huggingface import TensorSource, export_model
from nereus_jax.runtime import emu
from nereus_jax.runtime.world import take_stock

# 5 layers on pp 2 and 51 tokens on anything are padded; 3 key/value heads on tp 2 are shared.
CONFIG = DecoderConfig(
    num_layers=5,
    embed_dim=12,
    num_heads=6,
    num_kv_heads=3,
    head_dim=4,
    mlp_dim=18,
    vocab_size=51,
    tie_embeddings=False,
    qkv_bias=True,
)
LAYOUTS = [(1, 1, 1), (2, 2, 2), (1, 1, 6), (8, 1, 1), (1, 4, 1)]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids="dp{0[0]}pp{0[1]}tp{0[2]}".format)


def site_of(layout: tuple[int, int, int], num_kv_heads: int = 3) -> emu.Site:
    world = take_stock()
    parallel = ParallelLayout(*layout)
    placement = Placement(layout=parallel, devices=world.pool.devices[: parallel.num_devices])
    return emu.make_site(world, ACTOR_TRAIN, placement, num_kv_heads)


def special(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    """Random bits, NaNs and negative zeros among them."""
    rng = np.random.default_rng(seed)
    width = np.dtype(dtype).itemsize
    values = rng.integers(0, 256, (math.prod(shape), width), np.uint8).view(dtype).reshape(shape)
    values.reshape(-1)[::7] = -0.0
    return values


def leaves_of(config: DecoderConfig, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    return {x.name: special(x.shape, dtype, i) for i, x in enumerate(config.spec(Head.LM))}


def tensors_of(directory: pathlib.Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: (x.dtype.name, x.shape, x.tobytes())
        for path in directory.glob("*.safetensors")
        for name, x in safetensors.numpy.load_file(path).items()
    }


@layouts
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_files_to_a_layout_to_files(tmp_path: pathlib.Path, layout: Any, dtype: Any):
    name = np.dtype(dtype).name
    export_model(tmp_path / "a", CONFIG, leaves_of(CONFIG, dtype), name, max_file_bytes=3000)
    source = TensorSource(tmp_path / "a")
    params = emu.load(CONFIG.spec(Head.LM, name), site_of(layout), source.read)
    export_model(tmp_path / "b", CONFIG, params, name)
    assert [p.name for p in (tmp_path / "b").glob("*.safetensors")] == ["model.safetensors"]
    assert tensors_of(tmp_path / "b") == tensors_of(tmp_path / "a")


@layouts
def test_a_mesh_is_filled_with_what_was_read(layout: Any):
    site, spec = site_of(layout), CONFIG.spec(Head.LM, "bfloat16")
    rng = np.random.default_rng(0)
    leaves = {leaf.name: rng.normal(size=leaf.shape).astype(np.float32) for leaf in spec}
    params = emu.load(spec, site, lambda name, index: leaves[name][index])
    for leaf in spec:
        got = params[leaf.name]
        assert got.shape == leaf.padded_shape(spec.rules, site.mesh_shape)
        assert got.sharding == site.leaf_sharding(leaf, spec.rules)
        padding = [(0, n - m) for n, m in zip(got.shape, leaf.shape, strict=True)]
        padded = np.pad(leaves[leaf.name].astype(ml_dtypes.bfloat16), padding)
        np.testing.assert_array_equal(np.asarray(got), padded, err_msg=leaf.name)


def test_replicas_are_read_once_and_layers_one_by_one():
    reads: list[tuple[str, tuple[slice, ...]]] = []
    leaves = leaves_of(CONFIG)

    def read(name: str, index: tuple[slice, ...]) -> np.ndarray:
        reads.append((name, index))
        return leaves[name][index]

    emu.load(CONFIG.spec(Head.LM), site_of((2, 2, 2)), read)
    keys = [
        index for name, index in reads if name == "layers.k"
    ]  # on pp alone: tp 2 shares 3 heads
    assert [(i[0].start, i[0].stop) for i in keys] == [(layer, layer + 1) for layer in range(5)]
    assert sum(leaves[name][index].size for name, index in reads) == sum(
        x.size for x in leaves.values()
    )


def test_slices_of_global_arrays():
    leaf = CONFIG.spec(Head.LM)["layers.q"]
    whole = special(leaf.shape, np.float32, 0)
    spec = CONFIG.spec(Head.LM)
    for layout in LAYOUTS:
        array = emu._load_leaf(leaf, spec.rules, site_of(layout), lambda _, index: whole[index])
        for index in (
            (slice(1, 4), slice(2, 11), slice(3, 22)),
            (slice(0, 5),) + (slice(None),) * 2,
        ):
            assert read_slice(array, index).tobytes() == whole[index].tobytes()
    assert read_slice(array, (slice(2, 2), slice(0, 3), slice(0, 3))).shape == (0, 3, 3)


def test_neither_way_needs_the_whole_model_on_the_host(tmp_path: pathlib.Path):
    config = DecoderConfig(
        num_layers=24,
        embed_dim=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        mlp_dim=256,
        vocab_size=500,
    )
    spec = config.spec(Head.LM)
    model_bytes, site = spec.num_elements * 4, site_of((1, 4, 2), 2)
    tensor_bytes = max(x.num_bytes // x.shape[0] if "." in x.name else x.num_bytes for x in spec)
    leaves = leaves_of(config)
    params = emu.load(spec, site, lambda name, index: leaves[name][index])

    def peak_bytes(action: Any) -> int:
        tracemalloc.start()
        action()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    export_model(tmp_path, config, params)  # fills the caches of jax, as the load above did
    export = peak_bytes(lambda: export_model(tmp_path, config, params, max_file_bytes=10**6))
    source = TensorSource(tmp_path)
    load = peak_bytes(lambda: emu.load(spec, site, source.read))
    print(f"{model_bytes=} {tensor_bytes=} {export=} {load=}")
    small = 500_000  # headers, names, what Python itself takes
    assert export < 3 * tensor_bytes + small < model_bytes / 8
    # A block is done with when its copies are ready, but threads of jax let go of it, and on a busy
    # machine they come late: up to a leaf's blocks were seen alive where one is needed.
    assert load < model_bytes / 2


def test_files_hold_layers_in_order_and_no_more_than_allowed(tmp_path: pathlib.Path):
    leaves = leaves_of(CONFIG)
    export_model(tmp_path, CONFIG, leaves, max_file_bytes=3000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    total = len(files)
    assert files == [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    assert total > 5
    sizes = {"total_parameters": CONFIG.num_params(Head.LM)}
    sizes["total_size"] = 4 * sizes["total_parameters"]
    assert index["metadata"] == sizes
    order: list[str] = []
    for file in files:
        held = safetensors_file.read_header(tmp_path / file)
        assert {n for n, f in index["weight_map"].items() if f == file} == set(held)
        num_bytes = sum(4 * math.prod(t.shape) for t in held.values())
        assert num_bytes <= 3000 or len(held) == 1
        order += held
    layers = [int(name.split(".")[2]) for name in order if "layers" in name]
    assert layers == sorted(layers)
    assert order[0] == "model.embed_tokens.weight" and order[-1] == "lm_head.weight"
    with pytest.raises(ConfigError, match="max_file_bytes must be positive, got 0"):
        export_model(tmp_path, CONFIG, leaves, max_file_bytes=0)


def test_an_export_replaces_older_weights_even_those_it_reads(tmp_path: pathlib.Path):
    first = leaves_of(CONFIG)
    export_model(tmp_path, CONFIG, first, max_file_bytes=3000)
    (tmp_path / "notes.safetensors").write_bytes(b"")
    before, source = tensors_of_model(tmp_path), TensorSource(tmp_path)

    def reader(name: str) -> Any:
        return lambda index: source.read(name, index)

    for max_file_bytes in (5000, 10**9, 4000):
        lazy = {name: reader(name) for name in source.leaf_names}
        export_model(tmp_path, CONFIG, lazy, max_file_bytes=max_file_bytes)
        assert tensors_of_model(tmp_path) == before
        source = TensorSource(tmp_path)
        single = (tmp_path / "model.safetensors").exists()
        assert single == (max_file_bytes == 10**9)
        assert single != (tmp_path / "model.safetensors.index.json").exists()
    assert (tmp_path / "notes.safetensors").exists()


def tensors_of_model(directory: pathlib.Path) -> dict[str, Any]:
    source = TensorSource(directory)
    return {name: source.read(name).tobytes() for name in source.leaf_names}


def test_an_export_that_fails_leaves_the_weights_there_were(tmp_path: pathlib.Path):
    leaves = leaves_of(CONFIG)
    export_model(tmp_path, CONFIG, leaves)
    before = tensors_of(tmp_path)

    def full(index: tuple[slice, ...]) -> np.ndarray:
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="cannot be written: No space left on device; free sp"):
        export_model(tmp_path, CONFIG, {**leaves, "lm_head": full}, max_file_bytes=3000)
    assert tensors_of(tmp_path) == before
    assert not list(tmp_path.glob("*.partial"))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="file cannot be written: File exists"):
        export_model(tmp_path / "file", CONFIG, leaves)
    with pytest.raises(DataError, match="nowhere is no directory; give the one"):
        export_model(tmp_path, CONFIG, leaves, tokenizer_directory=tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"final_norm must have shape \(12,\), got \(11,\)"):
        export_model(tmp_path, CONFIG, {**leaves, "final_norm": jax.numpy.zeros(11)})


def test_files_that_do_not_fit_their_index(tmp_path: pathlib.Path):
    export_model(tmp_path, CONFIG, leaves_of(CONFIG), max_file_bytes=3000)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    third, fourth = sorted(tmp_path.glob("model-*"))[2:4]
    third.rename(tmp_path / "kept")
    with pytest.raises(
        DataError, match=r"model-00003-of-.* does not exist, but .* places model\.l"
    ):
        TensorSource(tmp_path)
    fourth.rename(third)
    with pytest.raises(DataError, match=r"00003-of-.* lacks model\.layers\..* places in it; the f"):
        TensorSource(tmp_path)
    third.rename(fourth)
    (tmp_path / "kept").rename(third)
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"index\.json lacks model\.norm\.weight, which"):
        TensorSource(tmp_path)


def test_weights_under_another_name(tmp_path: pathlib.Path):
    export_model(tmp_path, CONFIG, leaves_of(CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    with pytest.raises(DataError, match=r"rename what it has, weights\.safetensors, if that is"):
        TensorSource(tmp_path)


def test_generation_config_goes_along(tmp_path: pathlib.Path):
    (tmp_path / "from").mkdir()
    text = '{"eos_token_id": [2, 7], "temperature": 0.6}'
    (tmp_path / "from" / "generation_config.json").write_text(text)
    scaled = Llama3Rope(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64
    )
    config = DecoderConfig(**{**vars(CONFIG), "rope_scaling": scaled})
    out = tmp_path / "to"
    export_model(out, config, leaves_of(config), tokenizer_directory=tmp_path / "from")
    assert (out / "generation_config.json").read_text() == text
    assert TensorSource(out).config == config
