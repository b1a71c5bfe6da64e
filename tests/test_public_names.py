"""The public names are a promise: a change here is a change for other codebases."""

import tomllib
from pathlib import Path

import pytest

import nereus_jax
from nereus_jax.core import errors

PUBLIC_NAMES = [
    "CheckpointError",
    "CompileQueue",
    "ConfigError",
    "DataError",
    "DeviceFullError",
    "DevicesLostError",
    "DigestError",
    "DivergenceError",
    "EmuSpec",
    "InfeasiblePlanError",
    "LostStateError",
    "NereusError",
    "OutOfMemoryError",
    "PlanTooLargeError",
    "PoolInbox",
    "ReshardError",
    "RewardError",
    "StorageError",
    "TransferCost",
    "TransitionError",
    "TransitionProgram",
    "WorldError",
    "__version__",
    "reshard",
]


def test_public_names_are_pinned() -> None:
    assert nereus_jax.__all__ == PUBLIC_NAMES
    assert set(PUBLIC_NAMES) <= set(dir(nereus_jax))


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(nereus_jax, name) is not None


def test_a_name_is_the_object_of_its_module() -> None:
    assert nereus_jax.ConfigError is errors.ConfigError


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = nereus_jax.nothing  # pyright: ignore[reportAttributeAccessIssue]


def test_every_error_is_public_and_a_child_of_nereus_error() -> None:
    own = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert {e.__name__ for e in own} == {n for n in PUBLIC_NAMES if n.endswith("Error")}
    assert all(issubclass(e, errors.NereusError) for e in own)


def test_version_has_one_source() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["version"]["path"] == "nereus_jax/__init__.py"
    assert nereus_jax.__version__ == "0.1.0"
