"""What devices hold in a step, and a budget that refuses as a full device does."""

import jax
import pytest

from nereus_jax.core.errors import DeviceFullError
from nereus_jax.runtime.faults import watch
from nereus_jax.runtime.ledger import MemoryLedger
from nereus_jax.runtime.world import take_stock


def test_peaks_are_what_is_held_and_the_largest_program() -> None:
    ledger = MemoryLedger()
    ledger.start_step({"0:0": 100, "0:1": 40})
    ledger.launch("a", ("0:0", "0:1"), 30)
    ledger.launch("b", ("0:1", "1:5"), 70)  # 1:5 is another process's
    ledger.launch("c", ("0:1",), 10)
    assert ledger.peak == {"0:0": 130, "0:1": 110} and ledger.peak_bytes == 130
    ledger.start_step({"0:0": 90})
    assert ledger.peak == {"0:0": 90}


def test_a_budget_refuses_as_a_full_device_does() -> None:
    ledger = MemoryLedger(budget_bytes=128)
    ledger.start_step({"0:0": 100})
    ledger.launch("train of actor-TRAIN", ("0:0",), 28)
    refused = r"RESOURCE_EXHAUSTED: Out of memory.*29 bytes for train of actor-TRAIN on device 0:0"
    with pytest.raises(jax.errors.JaxRuntimeError, match=refused):
        ledger.launch("train of actor-TRAIN", ("0:0",), 29)
    world = take_stock()
    with pytest.raises(DeviceFullError, match=r"no memory left.*use more devices"), watch(world):
        ledger.launch("train of actor-TRAIN", ("0:0",), 29)
