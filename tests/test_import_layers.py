"""What must import in milliseconds loads no jax; asked of a fresh interpreter, over all submodules.

import-linter sees the imports of this project; this sees those of its dependencies as well.
"""

import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WITHOUT_JAX = (
    "nereus_jax.core",
    "nereus_jax.config",
    "nereus_jax.data",
    "nereus_jax.report",
    "nereus_jax.planning",
    "nereus_jax.control",
    "nereus_jax.elastic",
    "nereus_jax.simulator",
)
PROGRAM = """
import importlib, pkgutil, sys
name = sys.argv[1]
module = importlib.import_module(name)
if name != "nereus_jax":
    for info in pkgutil.walk_packages(getattr(module, "__path__", ()), name + "."):
        importlib.import_module(info.name)
heavy = {"jax", "jaxlib", "flax", "optax", "orbax", "chex", "tensorboardX", "torch", "transformers"}
print(sorted(heavy & {loaded.split(".")[0] for loaded in sys.modules}))
"""


EXISTING = [name for name in WITHOUT_JAX if importlib.util.find_spec(name) is not None]


@pytest.mark.parametrize("name", ["nereus_jax", *EXISTING])
def test_imports_no_jax(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, name],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


def test_each_package_without_jax_is_in_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (c for c in contracts["contracts"] if c["id"] == "without-jax")
    assert set(contract["source_modules"]) == set(EXISTING)
