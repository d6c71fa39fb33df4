from __future__ import annotations

from fxmem.graph import Phase
from fxmem.memory.allocation import replay
from fxmem.memory.allocator import AllocatorSettings, Shortage
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
    events = make_events((0, 11), (1, 5), (0, -11), (None, 12), (None, -12), (3, 0), (2, 24))
    profile = replay(events)
    assert to_mib(profile.requested_bytes) == [11, 16, 5, 17, 5, 5, 29]
    assert to_mib(profile.allocated_bytes) == [12, 17, 5, 17, 5, 5, 29]
    assert to_mib(profile.reserved_bytes) == [12, 32, 32, 32, 32, 32, 56]
    assert (profile.shortage, profile.retries) == (None, 0)
    assert replay(()).reserved_bytes == ()


def test_memory_runs_out_at_an_event() -> None:
    events = make_events((0, 20), (1, 20), (2, 20), (0, -20))
    profile = replay(events, capacity_bytes=60 * MIB, context_bytes=1)
    assert profile.shortage == Shortage(20 * MIB, 20 * MIB, 40 * MIB, 40 * MIB, 20 * MIB - 1)
    assert to_mib(profile.reserved_bytes) == [20, 40]
    assert profile.retries == 1
    assert replay(events, capacity_bytes=60 * MIB).shortage is None


def test_settings_decide() -> None:
    events = make_events((0, 21), (1, 19))
    assert to_mib(replay(events).reserved_bytes) == [22, 42]
    expandable = AllocatorSettings(expandable_segments=True)
    assert to_mib(replay(events, expandable).reserved_bytes) == [40, 40]


def test_the_program_empties_the_cache() -> None:
    first, free, last = make_events((0, 20), (0, -20), (1, 30))
    empty = Event(Action.EMPTY, 0, None, 1, Phase.FORWARD)
    assert to_mib(replay([first, free, empty, last]).reserved_bytes) == [20, 20, 0, 30]
