"""The states of random number generators, which a step copies, sets and seeds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fxmem.recording.recorder import Recorder

_SETTERS = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state")
"""Of ``torch.cuda``; those of the CPU all come to its generator."""


@contextmanager
def watch_random_state(recorder: Recorder) -> Iterator[None]:
    """Sees states that are kept, as by checkpoints until backward, and that others are set.

    States are real tensors, made without an operator. Nothing is set: fake tensors draw nothing,
    and the generators are the user's.

    Args:
        recorder: Is told.
    """
    get_state = torch.get_rng_state

    def get_watched_state() -> torch.Tensor:
        state = get_state()
        with torch._C.DisableTorchFunction():
            recorder.see_random_state(state)
        return state

    def see_seeding(*_args: Any, **_kwargs: Any) -> None:
        recorder.see_seeding()

    with contextlib.ExitStack() as stack:
        for module in (torch, torch.random):
            stack.enter_context(_replace(module, "get_rng_state", get_watched_state))
        for name in _SETTERS:
            stack.enter_context(_replace(torch.cuda, name, see_seeding))
        # As `from torch import manual_seed` finds it too.
        watched = _WatchedGenerator(torch.default_generator, see_seeding)
        stack.enter_context(_replace(torch.random, "default_generator", watched))
        yield


@contextmanager
def _replace(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


class _WatchedGenerator:
    """Stands for the CPU's generator, which stays as it is."""

    def __init__(self, generator: torch.Generator, see_seeding: Callable[[], None]) -> None:
        self._generator = generator
        self._see_seeding = see_seeding

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def manual_seed(self, _seed: int) -> torch.Generator:
        self._see_seeding()
        return self._generator

    def seed(self) -> int:
        self._see_seeding()
        return self._generator.initial_seed()

    def set_state(self, _state: torch.Tensor) -> torch.Generator:
        self._see_seeding()
        return self._generator
