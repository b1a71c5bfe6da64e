"""The one conftest: 8 emulated CPU devices, strict ranks, Hypothesis profiles.

`-m gpu` puts the GPUs first, so that `jax.devices()` are GPUs; the 8 CPU devices stay beside them.
"""

import os
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest

NUM_CPU_DEVICES = 8
# A loaded machine may start the 8 threads of a collective late: XLA aborts after 40 s by default.
XLA_FLAGS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)

os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *XLA_FLAGS)).strip()

import jax  # noqa: E402  (XLA reads its flags once)

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=25)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    """Set jax up before a test module can touch a device."""
    platforms = "cuda,cpu" if config.option.markexpr == "gpu" else "cpu"
    jax.config.update("jax_platforms", platforms)
    jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
    jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session", autouse=True)
def eight_cpu_devices() -> None:
    """A test never skips for want of devices: the count is asserted once."""
    assert len(jax.devices("cpu")) == NUM_CPU_DEVICES


@pytest.fixture(scope="session", autouse=True)
def compilation_cache() -> Iterator[None]:
    """A program that several tests build is compiled once a session (0.3 s against 0.04 s)."""
    with tempfile.TemporaryDirectory(prefix="nereus-test-cache-") as path:
        jax.config.update("jax_compilation_cache_dir", path)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        yield
