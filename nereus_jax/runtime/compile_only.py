"""GPUs that are not there: XLA compiles for them with jax's CUDA plugin, without any GPU."""

import importlib.util
import os

import jax
from jax.experimental import topologies

from nereus_jax.core.errors import ConfigError
from nereus_jax.runtime.world import DeviceHandle

PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
DEVICES_PER_HOST = 8
# What XLA's compiler wants to know of a GPU; the memory is what XLA has of an 80 GB card.
H100_TARGET = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  device_memory_size: 84942979072  memory_bandwidth: 3352320000000  l2_cache_size: 52428800
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def has_gpu_compiler() -> bool:
    """Whether jax's CUDA plugin is installed, which XLA's compiler for GPUs comes with."""
    return any(importlib.util.find_spec(name) is not None for name in PLUGINS)


def compile_only_devices(num_devices: int) -> list[DeviceHandle]:
    """H100s that are not there: good for meshes, abstract arrays and compiling, not for running.

    Args:
      num_devices: of them; they come in hosts of 8.

    Raises:
      ConfigError: XLA's compiler for GPUs is not installed.
    """
    if not has_gpu_compiler():
        raise ConfigError(
            "--verify=compile needs XLA's compiler for GPUs, which comes with jax's CUDA plugin; "
            "install the extra gpu-compile: pip install 'nereus_jax[gpu-compile]' (no GPU needed)"
        )
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # compiling needs no cuDNN and no driver
    jax.config.update("jax_platforms", "cpu")
    hosts = -(-num_devices // DEVICES_PER_HOST)
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="h100",
        target_config=H100_TARGET,
        topology=f"1x{hosts}x{DEVICES_PER_HOST}",  # slices x hosts x devices of a host
    )
    return list(topology.devices)
