from __future__ import annotations

import pytest

from fxmem.graph import Phase
from fxmem.memory.allocator import (
    BEFORE_FIRST,
    AllocatorSettings,
    Fragmentation,
    Peak,
    Shortage,
    replay,
)
from fxmem.memory.timeline import Action, Event

MIB = 1024**2


def make_events(*changes: tuple[int | None, int]) -> tuple[Event, ...]:
    """Events from pairs of a storage and its MiB, negative where it is freed."""
    return tuple(
        Event(
            Action.ALLOC if mib > 0 else Action.FREE, abs(mib) * MIB, storage, step, Phase.FORWARD
        )
        for step, (storage, mib) in enumerate(changes)
    )


def to_mib(series: tuple[int, ...]) -> list[int]:
    return [nbytes // MIB for nbytes in series]


def test_a_step_is_followed_event_by_event() -> None:
    profile = replay(make_events((0, 11), (1, 5), (0, -11), (None, 12), (None, -12), (2, 24)))
    assert to_mib(profile.requested_bytes) == [11, 16, 5, 17, 5, 29]
    assert to_mib(profile.allocated_bytes) == [12, 17, 5, 17, 5, 29]
    assert to_mib(profile.reserved_bytes) == [12, 32, 32, 32, 32, 56]
    assert profile.peak_requested == Peak(29 * MIB, 5)
    assert profile.peak_allocated == Peak(29 * MIB, 5)
    assert profile.peak_reserved == Peak(56 * MIB, 5)
    # The segment of storage 0, free, and what is left behind storage 1.
    assert profile.fragmentation == Fragmentation(27 * MIB, 2, 15 * MIB, 15 * MIB)
    assert profile.shortage is None


def test_the_first_of_equal_peaks_counts() -> None:
    profile = replay(make_events((0, 20), (0, -20), (1, 20)))
    assert profile.peak_allocated == Peak(20 * MIB, 0)
    assert profile.peak_reserved == Peak(20 * MIB, 0)


def test_fragmentation_is_that_at_the_peak() -> None:
    profile = replay(make_events((0, 20), (1, 30), (0, -20), (1, -30)))
    assert profile.fragmentation == Fragmentation(0, 0, 0, 0)


def test_what_led_to_the_step_is_still_cached() -> None:
    warmup = [(0, 10 * MIB), (-1, 40 * MIB), (None, 3 * MIB), (None, -3 * MIB), (-1, -40 * MIB)]
    profile = replay(make_events((1, 30), (0, -10)), warmup=warmup)
    assert to_mib(profile.allocated_bytes) == [40, 30]
    assert to_mib(profile.reserved_bytes) == [70, 70]
    assert profile.peak_reserved == Peak(70 * MIB, BEFORE_FIRST)
    assert profile.peak_requested == Peak(40 * MIB, 0)


def test_without_events_there_is_what_was_there() -> None:
    profile = replay((), warmup=[(0, 10 * MIB)])
    assert profile.allocated_bytes == profile.reserved_bytes == ()
    assert profile.peak_allocated == profile.peak_reserved == Peak(10 * MIB, BEFORE_FIRST)
    assert replay(()).peak_reserved == Peak(0, BEFORE_FIRST)


def test_storages_without_bytes_take_none() -> None:
    events = (
        Event(Action.ALLOC, 0, 0, 0, Phase.FORWARD),
        Event(Action.FREE, 0, 0, 0, Phase.FORWARD),
    )
    assert replay(events).reserved_bytes == (0, 0)


def test_memory_runs_out_at_an_event() -> None:
    events = make_events((0, 20), (1, 20), (2, 20), (0, -20))
    profile = replay(events, capacity_bytes=60 * MIB, context_bytes=1)
    assert profile.shortage == Shortage(20 * MIB, 20 * MIB, 40 * MIB, 40 * MIB, 20 * MIB - 1)
    assert to_mib(profile.reserved_bytes) == [20, 40]
    assert not profile.in_warmup
    assert profile.retries == 1
    assert replay(events, capacity_bytes=60 * MIB).shortage is None


def test_memory_runs_out_before_the_step() -> None:
    warmup = [(0, 20 * MIB), (1, 20 * MIB)]
    profile = replay(make_events((2, 1)), capacity_bytes=30 * MIB, warmup=warmup)
    assert profile.shortage is not None and profile.in_warmup
    assert profile.reserved_bytes == ()
    assert profile.peak_reserved == Peak(20 * MIB, BEFORE_FIRST)


def test_settings_decide() -> None:
    events = make_events((0, 21), (1, 19))
    assert to_mib(replay(events).reserved_bytes) == [22, 42]
    expandable = AllocatorSettings(expandable_segments=True)
    assert to_mib(replay(events, expandable).reserved_bytes) == [40, 40]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (((0, 1), (0, 1)), "storage 0 is allocated twice"),
        (((0, -1),), "storage 0 is freed but was not allocated"),
    ],
)
def test_events_that_contradict_each_other(
    changes: tuple[tuple[int, int], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replay(make_events(*changes))
