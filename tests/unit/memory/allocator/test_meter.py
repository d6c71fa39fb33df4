from __future__ import annotations

from fxmem.memory.allocator.heap import DeviceMemory
from fxmem.memory.allocator.meter import AllocatorMeter
from fxmem.memory.allocator.settings import AllocatorSettings

MIB = 1024**2


def test_peaks_are_reset_and_the_history_is_fed_once() -> None:
    meter, history = AllocatorMeter(AllocatorSettings()), [(0, 24 * MIB), (0, -24 * MIB)]
    meter.feed(history, {})
    meter.reset_peaks()
    history += [(1, 3 * MIB), (None, 0)]
    meter.feed(history, {})
    meter.feed(history, {})
    counters = {name: value["all"] for name, value in meter.read().items() if "_b" in name}
    assert counters["allocated_bytes"]["peak"] == counters["active_bytes"]["current"] == 3 * MIB
    assert counters["allocated_bytes"]["allocated"] == 27 * MIB
    assert counters["reserved_bytes"]["peak"] == counters["reserved_bytes"]["current"] == 24 * MIB
    meter.feed([*history, (1, -3 * MIB), (None, 0)], {})
    assert meter.read()["reserved_bytes"]["all"]["current"] == 0
    assert list(meter.read()["allocation"]["all"].values()) == [0, 1, 2, 2]
    meter.reset_sums()
    assert meter.read()["allocated_bytes"]["all"]["allocated"] == 0


def test_a_stream_has_blocks_of_its_own() -> None:
    meter = AllocatorMeter(AllocatorSettings())
    meter.feed([(0, 24 * MIB), (0, -24 * MIB), (1, 24 * MIB)], {1: 7})
    assert meter.read()["reserved_bytes"]["all"]["current"] == 48 * MIB


def test_memory_that_runs_out() -> None:
    meter = AllocatorMeter(AllocatorSettings(), DeviceMemory(60 * MIB))
    history = [(0, 40 * MIB), (0, -40 * MIB), (1, 50 * MIB)]
    meter.feed(history, {})
    assert meter.read()["reserved_bytes"]["all"]["peak"] == 50 * MIB
    assert (meter.read()["num_alloc_retries"], meter.read()["num_ooms"]) == (1, 0)
    meter.feed([*history, (2, 20 * MIB)], {})
    assert meter.read()["allocated_bytes"]["all"]["current"] == 70 * MIB
    assert meter.read()["num_ooms"] == 1
