"""Hardware descriptions: all that are shipped, and what a wrong one is told."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from nereus_jax.core.errors import ConfigError
from nereus_jax.planning.hardware import (
    CPU_EMULATED,
    hardware_names,
    hardware_of_kind,
    load_hardware,
    parse_hardware,
)

GPUS = [name for name in hardware_names() if name != CPU_EMULATED]


def description(**changes: Any) -> dict[str, Any]:
    link = {"bytes_per_s": 1e9, "latency_s": 1e-6}
    fields = {
        "name": "toy",
        "devices_per_node": 4,
        "peak_flops_per_s": {"bfloat16": 1e12},
        "memory_bytes": 1 << 30,
        "memory_bytes_per_s": 1e11,
        "intra_node": link,
        "inter_node": link,
        "host": link,
    }
    return fields | changes


@pytest.mark.parametrize("name", GPUS)
def test_shipped_hardware_is_plausible(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name and hardware.sources
    assert "float16" in hardware.peak_flops_per_s
    assert ("bfloat16" in hardware.peak_flops_per_s) == (not name.startswith("v100"))
    assert 1e13 < hardware.peak_flops_per_s["float16"] < 1e16
    assert hardware.memory_bytes > 10 * 2**30
    assert hardware.inter_node.bytes_per_s < hardware.memory_bytes_per_s
    assert hardware.intra_node.latency_s <= hardware.inter_node.latency_s


def test_the_kinds_that_users_ask_for_are_there() -> None:
    wanted = {
        "v100-16gb",
        "a100-40gb",
        "a100-80gb",
        "h100",
        "h200",
        "b200",
        "mi300x",
        "cpu-emulated",
    }
    assert wanted <= set(hardware_names())


def test_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'h10' is not known; nearest: h100"):
        load_hardware("h10")
    with pytest.raises(ConfigError, match=r"use a100-40gb.*cpu-emulated"):
        load_hardware("zzzzzz")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_bytes": -1}, r"memory_bytes must be a positive number, got -1"),
        ({"memory_bytes_per_s": 0}, r"memory_bytes_per_s must be a positive number, got 0"),
        ({"memory_bytes": True}, r"memory_bytes must be a positive number, got True"),
        ({"devices_per_node": 1.5}, r"devices_per_node must be whole, got 1.5"),
        ({"peak_flops_per_s": {}}, r"peak_flops_per_s must give a peak for each dtype"),
        ({"peak_flops_per_s": {"bfloat16": "x"}}, r"peak_flops_per_s.bfloat16 must be"),
        ({"host": 3}, r"host must have bytes_per_s and latency_s, got 3"),
        ({"host": {"bytes_per_s": 1.0}}, r"field host.latency_s is missing"),
        (
            {"host": {"bytes_per_s": 1.0, "latency_s": -1.0}},
            r"host.latency_s must be a number of at least 0, got -1.0",
        ),
        ({"flops": 3}, r"field flops is not known; it has name, "),
        ({"usd_per_device_hour": -2}, r"usd_per_device_hour must be a positive number"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_hardware(description(**changes), "toy.json")


@pytest.mark.parametrize("missing", [k for k in description()])
def test_a_missing_field_is_named(missing: str) -> None:
    fields = description()
    del fields[missing]
    with pytest.raises(ConfigError, match=f"toy.json: field {missing} is missing"):
        parse_hardware(fields, "toy.json")


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(description(usd_per_device_hour=2.5)))
    hardware = load_hardware(path)
    assert hardware.devices_per_node == 4 and hardware.usd_per_device_hour == 2.5
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"mine.json is not JSON"):
        load_hardware(path)
    with pytest.raises(ConfigError, match=r"absent.json cannot be read: No such file"):
        load_hardware(tmp_path / "absent.json")


def test_this_machine_is_measured_in_time() -> None:
    start_s = time.perf_counter()
    hardware = load_hardware(CPU_EMULATED, emulated_devices=4)
    assert time.perf_counter() - start_s < 3.0
    assert hardware.devices_per_node == 4
    assert 1e8 < hardware.peak_flops_per_s["float32"] < 1e14
    assert 1e7 < hardware.memory_bytes_per_s < 1e13
    with pytest.raises(ConfigError, match="at least 1 device, got 0"):
        load_hardware(CPU_EMULATED, emulated_devices=0)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA L40S", "l40s"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_device_finds_its_description(kind: str, name: str) -> None:
    assert hardware_of_kind(kind) == name


def test_a_device_without_a_description() -> None:
    with pytest.raises(ConfigError, match=r"'NVIDIA H1000'.*transition\.hardware"):
        hardware_of_kind("NVIDIA H1000")
