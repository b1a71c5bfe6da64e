"""Checkpoints come back bit for bit on any layout, or say in one line why they do not."""

import contextlib
import dataclasses
import functools
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nereus_jax.config import OptimizerConfig
from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.emu_spec import LeafSpec
from nereus_jax.core.errors import CheckpointError, StorageError
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement
from nereus_jax.core.roles import ACTOR_TRAIN
from nereus_jax.runtime.checkpoint_arrays import checksums, flatten
from nereus_jax.runtime.checkpoint_files import check_directory, finished_steps
from nereus_jax.runtime.checkpoints import CheckpointStore
from nereus_jax.runtime.emu import Site
from nereus_jax.runtime.engines.train import TrainState
from nereus_jax.runtime.optimizers import (
    abstract_state,
    is_leaf_spec,
    make_optimizer,
    state_spec,
)
from nereus_jax.runtime.world import take_stock

ROOT = Path(__file__).parents[2]
# Neither 5 layers nor 51 words divide by anything here, so that every layout pads them its own way.
MODEL = DecoderConfig(
    num_layers=5,
    embed_dim=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=6,
    vocab_size=51,
)
# Clipping and a schedule: NamedTuples, empty ones and two counters in the optimizer's state.
OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=0.1, schedule="linear"), 10)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A layout, which devices, and whether the moments are sharded over dp."""

    layout: ParallelLayout
    first: int = 0
    zero1: bool = False

    @property
    def site(self) -> Site:
        world = take_stock()
        devices = world.pool.devices[self.first : self.first + self.layout.num_devices]
        placement = Placement(layout=self.layout, devices=devices)
        return Site(model_stage=ACTOR_TRAIN, placement=placement, mesh=world.mesh(placement, 2))

    def specs(self, dtype: str) -> Any:
        """A TrainState of LeafSpecs (and ShapeDtypeStructs for counters)."""
        spec = MODEL.spec(Head.LM, dtype)
        moments = spec.with_zero(self.site.mesh_shape) if self.zero1 else spec
        params: Any = {leaf.name: leaf for leaf in spec}
        return TrainState(params, state_spec(OPTIMIZER, moments))

    def abstract(self, dtype: str) -> Any:
        spec = MODEL.spec(Head.LM, dtype)
        specs = self.specs(dtype)
        return jax.tree.map(
            lambda x: abstract_state(self.site, spec, x), specs, is_leaf=is_leaf_spec
        )


SETTINGS = {
    "one": Setting(layout=ParallelLayout()),
    "pp4": Setting(layout=ParallelLayout(pp=4), first=2),
    "dp2tp4-zero1": Setting(layout=ParallelLayout(dp=2, tp=4), zero1=True),
    "dp2pp2tp2-zero1": Setting(layout=ParallelLayout(dp=2, pp=2, tp=2), zero1=True),
}


def logical_values(specs: Any) -> dict[str, np.ndarray]:
    """Random bits for every leaf; the same for every setting."""
    values = {}
    for name, leaf in flatten_specs(specs).items():
        rng = np.random.default_rng(list(name.encode()))
        if isinstance(leaf, LeafSpec):
            values[name] = rng.standard_normal(leaf.shape).astype(jnp.dtype(leaf.dtype))
        else:
            values[name] = rng.integers(1, 1000, leaf.shape).astype(leaf.dtype)
    return values


def flatten_specs(specs: Any) -> dict[str, Any]:
    structure = jax.tree.structure(specs, is_leaf=is_leaf_spec)
    names = flatten(jax.tree.unflatten(structure, range(structure.num_leaves)))
    return dict(zip(names, jax.tree.leaves(specs, is_leaf=is_leaf_spec), strict=True))


def padded(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    whole = np.zeros(shape, values.dtype)
    whole[tuple(slice(n) for n in values.shape)] = values
    return whole


def make_state(setting: Setting, dtype: str) -> Any:
    values = logical_values(setting.specs(dtype))
    abstract = setting.abstract(dtype)
    leaves = []
    for name, target in flatten(abstract).items():
        leaves.append(jax.device_put(padded(values[name], target.shape), target.sharding))
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def assert_holds(state: Any, abstract: Any, values: dict[str, np.ndarray]) -> None:
    """Every leaf lies as asked, has the logical values bit for bit, and zeros elsewhere."""
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    targets = flatten(abstract)
    for name, x in flatten(state).items():
        target, want = targets[name], values[name]
        assert (x.shape, x.dtype, x.sharding) == (target.shape, target.dtype, target.sharding)
        assert np.asarray(x).tobytes() == padded(want, x.shape).tobytes(), name


@contextlib.contextmanager
def open_store(directory: Path, keep: int = 2, model: str = "tiny") -> Iterator[CheckpointStore]:
    store = CheckpointStore(directory, keep=keep, fingerprint=model)
    try:
        yield store
    finally:
        store.close()


def sharded(*axes: str | None, devices: slice = slice(None)) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices("cpu"))[devices], ("x",)), PartitionSpec(*axes))


def ramp(step: int, rows: int = 16) -> dict[str, jax.Array]:
    """A small state that is different at every step."""
    x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4) + 1000 * step
    return {"x": jax.device_put(x, sharded("x"))}


def ramp_target(rows: int = 16) -> dict[str, jax.ShapeDtypeStruct]:
    return {"x": jax.ShapeDtypeStruct((rows, 4), jnp.float32, sharding=sharded("x"))}


def assert_one_line(error: pytest.ExceptionInfo[Exception], *parts: object) -> None:
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message


@pytest.mark.parametrize(
    ("source", "dtype"),
    [*((name, "float32") for name in SETTINGS), ("dp2pp2tp2-zero1", "bfloat16")],
)
def test_a_state_comes_back_bit_for_bit_on_every_layout(
    tmp_path: Path, source: str, dtype: str
) -> None:
    meta = {"policy_version": 7, "data_position": 96, "rng": [2**32 - 1, 0], "kl_coef": 0.1 + 0.2}
    values = logical_values(SETTINGS[source].specs(dtype))
    with open_store(tmp_path / "a") as store:
        store.save(3, make_state(SETTINGS[source], dtype), meta)
    shapes = set()
    with open_store(tmp_path / "a") as store:
        assert store.latest_step() == 3
        assert store.read_meta(3) == meta
        for setting in SETTINGS.values():
            abstract = setting.abstract(dtype)
            assert_holds(store.restore(3, abstract), abstract, values)
            shapes.add(abstract.params["embed"].shape)
            shapes.add(abstract.params["layers.q"].shape)
    assert len(shapes) >= 5  # the layouts did differ in padding


def test_checksums_ignore_layout_and_padding_but_see_one_bit() -> None:
    sums = [checksums(flatten(make_state(s, "float32"))) for s in SETTINGS.values()]
    assert all(x == sums[0] for x in sums)
    x = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    want = checksums({"x": jax.device_put(x, sharded())})
    for bit in (0, 22, 31):
        flipped = x.copy()
        flipped.view(np.uint32)[3, 2] ^= np.uint32(1 << bit)
        assert checksums({"x": jax.device_put(flipped, sharded())}) != want
    swapped = np.ascontiguousarray(x[[1, 0, 2, 3, 4]])
    assert checksums({"x": jax.device_put(swapped, sharded())}) != want
    grown = np.full((8, 9), -0.0, np.float32)
    grown[:5, :7] = x
    assert checksums({"x": jax.device_put(grown, sharded("x"))}) == want


def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path: Path) -> None:
    @functools.partial(jax.jit, donate_argnums=0)
    def spoil(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return jax.tree.map(lambda x: x * 0 - 1, state)

    rows = 65536  # large enough that writing is still under way
    jax.block_until_ready(spoil(ramp(0, rows)))
    with open_store(tmp_path / "a", keep=9) as store:
        for step in range(1, 7):
            state = ramp(step, rows)
            store.save(step, state, {})
            if step % 2:
                state["x"].delete()
                state = ramp(-1, rows)
            for _ in range(3):
                state = spoil(state)
            jax.block_until_ready(state)
        store.wait()
        for step in range(1, 7):
            restored = store.restore(step, ramp_target(rows))["x"]
            np.testing.assert_array_equal(restored, ramp(step, rows)["x"])


def test_the_newest_are_kept_and_a_step_is_never_written_over(tmp_path: Path) -> None:
    with open_store(tmp_path / "a", keep=2) as store:
        assert store.latest_step() is None
        for step in (1, 5, 9, 12):
            store.save(step, ramp(step), {"step": step})
        store.wait()
        assert finished_steps(tmp_path / "a") == [9, 12]
        assert sorted(p.name for p in (tmp_path / "a" / "steps").iterdir()) == ["12", "9"]
        for step in (12, 11):
            with pytest.raises(CheckpointError) as error:
                store.save(step, ramp(step), {})
            assert_one_line(error, f"step {step}", "step 12", tmp_path)
    with open_store(tmp_path / "a", keep=1) as store:
        store.save(13, ramp(13), {})
        store.wait()
        assert finished_steps(tmp_path / "a") == [13]


def test_the_frozen_model_is_written_once_and_outlives_the_steps(tmp_path: Path) -> None:
    with open_store(tmp_path / "a", keep=1) as store:
        assert not store.has_frozen()
        with pytest.raises(CheckpointError, match="missing"):
            store.restore_frozen(ramp_target())
        store.save_frozen(ramp(0))
        store.save_frozen(ramp(100))  # a run that was killed before its first step starts again
        for step in (1, 2, 3):
            store.save(step, ramp(step), {})
        store.wait()
        with pytest.raises(CheckpointError) as error:
            store.save_frozen(ramp(101))
        assert_one_line(error, "step 3", "another workdir")
    with open_store(tmp_path / "a", keep=1) as store:
        assert store.has_frozen()
        target = {"x": jax.ShapeDtypeStruct((17, 4), jnp.float32, sharding=sharded())}
        restored = np.asarray(store.restore_frozen(target)["x"])
        np.testing.assert_array_equal(restored[:16], ramp(100)["x"])
        assert not restored[16:].any()


def test_a_directory_of_another_model_is_refused_before_anything_else(tmp_path: Path) -> None:
    directory = tmp_path / "a"
    check_directory(directory, "any")
    with open_store(directory, model="tiny-1"):
        pass
    with open_store(directory, model="tiny-2") as store:  # it holds no checkpoint yet
        store.save(1, ramp(1), {})
    check_directory(directory, "tiny-2")
    with pytest.raises(CheckpointError) as error:
        check_directory(directory, "tiny-1")
    assert_one_line(error, directory, "tiny-1", "tiny-2", "another workdir")
    with pytest.raises(CheckpointError, match="another model"):
        CheckpointStore(directory, keep=1, fingerprint="tiny-1")
    (directory / "model.json").write_text("{")
    with pytest.raises(CheckpointError) as error:
        check_directory(directory, "tiny-2")
    assert_one_line(error, directory / "model.json", "not known")


def test_arrays_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with open_store(tmp_path / "a") as store:
        store.save(1, ramp(1), {})
        store.wait()
        target = ramp_target()
        other = {
            "lacks": {**target, "y": target["x"], "z": target["x"]},
            "which this run has not": {"y": target["x"]},
            "float32[16, 4] there and bfloat16[16, 4] here": {
                "x": target["x"].update(dtype="bfloat16")
            },
            "there and float32[16] here": {"x": target["x"].update(shape=(16,))},
        }
        for part, abstract in other.items():
            with pytest.raises(CheckpointError) as error:
                store.restore(1, abstract)
            assert_one_line(error, part, "step 1", "configuration")
        with pytest.raises(CheckpointError) as error:
            store.restore(2, target)
        assert_one_line(error, "step 2", "[1]", tmp_path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [Path.unlink, cut, flip])
@pytest.mark.parametrize(
    "pattern",
    ["arrays/_METADATA", "arrays/manifest.ocdbt", "arrays/ocdbt.process_0/d/*", "*/metadata"],
)
def test_a_corrupt_checkpoint_names_itself_and_the_one_before(
    tmp_path: Path,
    pattern: str,
    damage: Callable[[Path], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    with open_store(tmp_path / "a") as store:
        for step in (3, 4):
            noise = np.random.default_rng(step).standard_normal((64, 64)).astype(np.float32)
            store.save(step, {"x": jax.device_put(noise, sharded("x"))}, {"step": step})
        store.wait()
        target = {"x": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharded(None, "x"))}

        def read() -> None:
            store.read_meta(4)
            store.restore(4, target)

        read()
        step = tmp_path / "a" / "steps" / "4"
        found = sorted(step.glob(pattern), key=lambda path: path.stat().st_size)
        damage(found[-1])  # the largest: others there are left over from merging
        capfd.readouterr()
        with pytest.raises(CheckpointError) as error:
            read()
        assert_one_line(error, "step 4", f"delete {step} to resume from step 3")
        assert capfd.readouterr().err == ""
        store.restore(3, target)
        shutil.rmtree(step)
        assert store.latest_step() == 3
        store.save(4, {"x": jax.device_put(noise, sharded("x"))}, {})


def start_child(*args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, Path(__file__).with_name("checkpoint_child.py"), *map(str, args)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def child_noise(step: int) -> np.ndarray:
    return np.random.default_rng(step).standard_normal((512, 256)).astype(np.float32)


def test_a_kill_at_any_moment_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    moments = random.Random(0)
    runs = []
    for i, what in enumerate(["steps", "steps", "steps", "frozen"]):
        delay_s = moments.uniform(0.05, 0.5)
        runs.append(
            (what, tmp_path / str(i), start_child("killed", what, tmp_path / str(i), delay_s))
        )
    target = {"x": jax.ShapeDtypeStruct((512, 256), jnp.float32, sharding=sharded("x"))}
    for what, directory, process in runs:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == -9, output
        done = int(output.split()[-1])
        with open_store(directory, model="m") as store:
            for name in ("steps", "frozen"):
                assert all(path.name.isdigit() for path in (directory / name).iterdir())
            if what == "frozen":
                if store.has_frozen():  # the one before is put away just before the next is named
                    restored = np.asarray(store.restore_frozen(target)["x"])
                    assert any(np.array_equal(restored, child_noise(s)) for s in range(done + 3))
                continue
            step = store.latest_step()
            assert step is not None and done <= step <= done + 2
            for whole in finished_steps(directory):
                assert store.read_meta(whole) == {"step": whole}
                np.testing.assert_array_equal(store.restore(whole, target)["x"], child_noise(whole))
            store.save(step + 1, ramp(step), {})


def test_a_full_disk_names_the_file_and_the_last_good_checkpoint(tmp_path: Path) -> None:
    # A limit on the size of a file fails inside the same writes as a full disk.
    output, _ = start_child("limited", tmp_path / "a").communicate(timeout=120)
    lines = [line for line in output.splitlines() if line.startswith("StorageError")]
    assert len(lines) == 1, output
    for part in ("step 2", "/d/", "File too large", "the last good one is step 1", "free disk"):
        assert part in lines[0]
    assert "['1']" in output.splitlines()  # nothing half-written is left to fill the disk
    assert finished_steps(tmp_path / "a") == [1, 3]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError) as error:
        CheckpointStore(tmp_path / "file" / "a", keep=1, fingerprint="m")
    assert_one_line(error, tmp_path / "file", "Not a directory", "another workdir")


def test_two_processes_save_and_restore_what_only_one_of_them_holds(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    members = [start_child("member", tmp_path / "a", port, rank) for rank in range(2)]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in members]
    finally:
        for process in members:
            process.kill()
    assert [process.returncode for process in members] == [0, 0], "\n".join(outputs)
