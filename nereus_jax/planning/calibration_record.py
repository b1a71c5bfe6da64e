# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""Efficiencies on disk, with what they hold for; and how well the model did with them.

A file says on which hardware and with which versions it was learned: the prior of the next run, of
any model on the same hardware.
"""

import dataclasses
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nereus_jax.core.errors import ConfigError
from nereus_jax.planning.calibration import CLASSES, Efficiencies, OperationClass

FORMAT = 1
OTHER_VERSIONS_STD = 0.15
"""What efficiencies may have changed by, as a logarithm, where versions have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """A predicted and a measured time.

    Attributes:
      seconds: predicted, by class.
      measured_s: what it took.
    """

    seconds: Mapping[OperationClass, float]
    measured_s: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return sum(self.seconds.values()) / self.measured_s - 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationError:
    """How far predictions were from measurements.

    Attributes:
      mape: mean of the absolute relative errors.
      max_error: the largest of them.
      bias: mean relative error, by class, weighted with the class's share; above 0: predicted too
        slow.
      count: predictions.
    """

    mape: float
    max_error: float
    bias: Mapping[OperationClass, float]
    count: int

    @classmethod
    def of(cls, predictions: list[Prediction]) -> "CalibrationError":
        """The errors of at least one prediction."""
        errors = np.array([p.error for p in predictions])
        shares = np.array([[p.seconds.get(c, 0.0) for c in CLASSES] for p in predictions])
        shares /= shares.sum(axis=1, keepdims=True)
        weight = shares.sum(axis=0)
        bias = errors @ shares / np.maximum(weight, 1e-30)
        return cls(
            mape=float(np.abs(errors).mean()),
            max_error=float(np.abs(errors).max()),
            bias={c: float(b) for c, b, w in zip(CLASSES, bias, weight, strict=True) if w > 0},
            count=len(predictions),
        )


def software_versions() -> dict[str, str]:
    """Of what efficiencies depend on beside the hardware."""
    return {"jax": importlib.metadata.version("jax")}


def save_efficiencies(
    path: Path, efficiencies: Efficiencies, hardware: str, versions: Mapping[str, str]
) -> None:
    """Writes a calibration file in one piece.

    Args:
      path: of the file.
      efficiencies: what was learned.
      hardware: `Hardware.name`.
      versions: of what the efficiencies depend on: {"jax": "0.10.2", ...}.
    """
    data = {
        "format": FORMAT,
        "hardware": hardware,
        "versions": dict(versions),
        "efficiencies": {c.value: efficiencies[c] for c in CLASSES},
        "observations": {
            c.value: float(n) for c, n in zip(CLASSES, efficiencies.observations, strict=True)
        },
        "log_covariance": [[float(x) for x in row] for row in efficiencies.covariance],
    }
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def load_efficiencies(path: Path, hardware: str, versions: Mapping[str, str]) -> Efficiencies:
    """Reads a calibration file, less sure of it where versions have changed.

    Args:
      path: of the file.
      hardware: what it must hold for.
      versions: as for `save_efficiencies`.

    Raises:
      ConfigError: the file cannot be read, is no calibration, or is one of other hardware.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        learned_on, learned_with = str(data["hardware"]), dict(data["versions"])
        efficiencies = _parse(data)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"calibration: {path} cannot be read: {reason}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"calibration: {path} is no calibration file ({type(error).__name__}: {error}); delete "
            f"it to start from the prior"
        ) from None
    if learned_on != hardware:
        raise ConfigError(
            f"calibration: {path} was learned on {learned_on}, this is {hardware}; give a file of "
            f"{hardware}, or none to start from the prior"
        )
    if learned_with != dict(versions):
        wider = efficiencies.covariance + OTHER_VERSIONS_STD**2 * np.eye(len(CLASSES))
        return dataclasses.replace(efficiencies, covariance=wider)
    return efficiencies


def _parse(data: dict[str, Any]) -> Efficiencies:
    values = np.array([float(data["efficiencies"][c.value]) for c in CLASSES])
    covariance = np.array(data["log_covariance"], np.float64)
    if covariance.shape != (len(CLASSES), len(CLASSES)) or not np.isfinite(covariance).all():
        raise ValueError("log_covariance is not a finite square of all classes")
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ValueError("an efficiency is not a positive number")
    if not (covariance == covariance.T).all() or np.linalg.eigvalsh(covariance).min() < -1e-9:
        raise ValueError("log_covariance is no covariance")
    return Efficiencies(
        log_values=np.log(values),
        covariance=covariance,
        observations=np.array([float(data["observations"][c.value]) for c in CLASSES]),
    )
