"""Hardware descriptions by name, from a file, and of this machine with emulated devices.

A description is a JSON object with the fields of `core.hardware.Hardware`; those of usual GPUs are
data of this package. `cpu-emulated` is measured when it is asked for.
"""

import difflib
import importlib.resources
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nereus_jax.core.errors import ConfigError
from nereus_jax.core.hardware import Hardware, Link

CPU_EMULATED = "cpu-emulated"
EMULATED_DEVICES = 8
"""Devices that share the machine where the caller does not say."""

_LINKS = ("intra_node", "inter_node", "host")
_NUMBERS = ("devices_per_node", "memory_bytes", "memory_bytes_per_s")
_OPTIONAL = ("usd_per_device_hour", "sources")


def hardware_names() -> tuple[str, ...]:
    """Every name that `load_hardware` knows."""
    files = importlib.resources.files("nereus_jax").joinpath("hardware").iterdir()
    names = [f.name.removesuffix(".json") for f in files if f.name.endswith(".json")]
    return (*sorted(names), CPU_EMULATED)


def load_hardware(
    name_or_path: str | Path, *, emulated_devices: int = EMULATED_DEVICES
) -> Hardware:
    """A kind of device by its name (`h100`) or from a JSON file.

    Args:
      name_or_path: one of `hardware_names()`, or a path that ends in .json.
      emulated_devices: for `cpu-emulated`: how many devices share this machine.

    Raises:
      ConfigError: nothing is called like this (the message has the nearest names), or a field of
        the file is missing, unknown or not a positive number (the message says which).
    """
    name = str(name_or_path)
    if name == CPU_EMULATED:
        return measure_cpu(emulated_devices)
    if name.endswith(".json"):
        return _read_file(Path(name))
    if name not in hardware_names():
        near = difflib.get_close_matches(name.lower(), hardware_names(), 3, 0.4)
        nearest = f"nearest: {', '.join(near)}" if near else f"use {', '.join(hardware_names())}"
        raise ConfigError(
            f"hardware: {name!r} is not known; {nearest}; or give a .json file with its peaks"
        )
    resource = importlib.resources.files("nereus_jax").joinpath("hardware", f"{name}.json")
    return parse_hardware(json.loads(resource.read_text(encoding="utf-8")), name)


def hardware_of_kind(kind: str) -> str:
    """The name of the description that fits a device best by what its backend calls it.

    All words of a name must be in the kind; of several names the one with most words counts.

    Args:
      kind: such as "NVIDIA H100 80GB HBM3".

    Raises:
      ConfigError: no description fits.
    """
    words = set(re.findall("[a-z0-9]+", kind.lower()))
    fitting = [n for n in hardware_names() if n != CPU_EMULATED and words.issuperset(n.split("-"))]
    if not fitting:
        raise ConfigError(
            f"hardware: no description fits {kind!r}; give transition.hardware one of "
            f"{', '.join(hardware_names())}, or a .json file with its peaks"
        )
    return max(fitting, key=lambda name: len(name.split("-")))


def _read_file(path: Path) -> Hardware:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"hardware: {path} cannot be read: {reason}; give another path") from None
    except ValueError as error:
        raise ConfigError(f"hardware: {path} is not JSON: {error}; correct the file") from None
    return parse_hardware(data, str(path))


def parse_hardware(data: object, where: str) -> Hardware:
    """Hardware from the content of a JSON file.

    Args:
      data: the parsed JSON.
      where: what to call it in an error.

    Raises:
      ConfigError: a field is missing, unknown, or not a positive number.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"hardware {where}: expected an object with fields, got {data!r}")
    fields: Mapping[str, Any] = data  # pyright: ignore[reportUnknownVariableType]
    _check_names(fields, ("name", "peak_flops_per_s", *_NUMBERS, *_LINKS), _OPTIONAL, where)
    peaks: Mapping[str, Any] = fields["peak_flops_per_s"]
    if not isinstance(peaks, Mapping) or not peaks:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"hardware {where}: peak_flops_per_s must give a peak for each dtype, got {peaks!r}"
        )
    price = fields.get("usd_per_device_hour")
    devices = _positive(fields, "devices_per_node", where)
    if devices != int(devices):
        raise ConfigError(f"hardware {where}: devices_per_node must be whole, got {devices!r}")
    return Hardware(
        name=str(fields["name"]),
        devices_per_node=int(devices),
        peak_flops_per_s={k: _positive(peaks, k, where, "peak_flops_per_s.") for k in peaks},
        memory_bytes=int(_positive(fields, "memory_bytes", where)),
        memory_bytes_per_s=_positive(fields, "memory_bytes_per_s", where),
        intra_node=_link(fields, "intra_node", where),
        inter_node=_link(fields, "inter_node", where),
        host=_link(fields, "host", where),
        usd_per_device_hour=None
        if price is None
        else _positive(fields, "usd_per_device_hour", where),
        sources=tuple(str(x) for x in fields.get("sources", ())),
    )


def _link(fields: Mapping[str, Any], name: str, where: str) -> Link:
    link = fields[name]
    if not isinstance(link, Mapping):
        raise ConfigError(
            f"hardware {where}: {name} must have bytes_per_s and latency_s, got {link!r}"
        )
    values: Mapping[str, Any] = link  # pyright: ignore[reportUnknownVariableType]
    _check_names(values, ("bytes_per_s", "latency_s"), (), where, f"{name}.")
    return Link(
        bytes_per_s=_positive(values, "bytes_per_s", where, f"{name}."),
        latency_s=_positive(values, "latency_s", where, f"{name}.", zero=True),
    )


def _check_names(
    fields: Mapping[str, Any],
    needed: tuple[str, ...],
    optional: tuple[str, ...],
    where: str,
    prefix: str = "",
) -> None:
    for name in needed:
        if name not in fields:
            raise ConfigError(f"hardware {where}: field {prefix}{name} is missing; add it")
    for name in fields:
        if name not in needed and name not in optional:
            raise ConfigError(
                f"hardware {where}: field {prefix}{name} is not known; it has "
                f"{', '.join((*needed, *optional))}"
            )


def _positive(
    fields: Mapping[str, Any], name: str, where: str, prefix: str = "", *, zero: bool = False
) -> float:
    value = fields[name]
    allowed = "a number of at least 0" if zero else "a positive number"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not np.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ConfigError(f"hardware {where}: {prefix}{name} must be {allowed}, got {value!r}")
    return float(value)


def measure_cpu(num_devices: int = EMULATED_DEVICES) -> Hardware:
    """This machine as `num_devices` equal emulated devices, measured in about a second.

    They share cores, caches and memory, so that each gets an equal part of what all of them do at
    once; a part is what a device has while all are busy.

    Args:
      num_devices: emulated devices that share the machine.
    """
    if num_devices < 1:
        raise ConfigError(f"{CPU_EMULATED}: needs at least 1 device, got {num_devices}")
    flops_per_s = _matrix_flops_per_s()
    bytes_per_s = _copy_bytes_per_s()
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # A message is a copy (read and write); the rendezvous of threads takes tens of microseconds.
    link = Link(bytes_per_s=bytes_per_s / num_devices / 2, latency_s=5e-5)
    return Hardware(
        name=CPU_EMULATED,
        devices_per_node=num_devices,
        peak_flops_per_s={
            "float32": flops_per_s / num_devices,
            "bfloat16": flops_per_s / num_devices,
        },
        memory_bytes=memory_bytes // num_devices,
        memory_bytes_per_s=bytes_per_s / num_devices,
        intra_node=link,
        inter_node=link,
        host=link,
        sources=("measured on this machine with numpy: a matrix product and a copy",),
    )


def _best_s(run: Callable[[], object], budget_s: float) -> float:
    """The shortest time of a call within a budget; the first call is not counted."""
    run()
    best_s, end_s = np.inf, time.perf_counter() + budget_s
    while time.perf_counter() < end_s:
        start_s = time.perf_counter()
        run()
        best_s = min(best_s, time.perf_counter() - start_s)
    return best_s


def _matrix_flops_per_s(size: int = 1024) -> float:
    a = np.full((size, size), 0.5, np.float32)
    b, out = a.copy(), np.empty_like(a)
    return 2.0 * size**3 / _best_s(lambda: np.matmul(a, b, out=out), 0.3)


def _copy_bytes_per_s(num_bytes: int = 1 << 26) -> float:
    source = np.ones(num_bytes, np.uint8)
    target = np.empty_like(source)
    seconds = _best_s(lambda: np.copyto(target, source), 0.3)  # pyright: ignore[reportUnknownMemberType]
    return 2.0 * num_bytes / seconds
