"""Process-wide state during a recording: random states, inference mode, garbage collection."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxmem.recording.recorder import Recorder

_SETTERS = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state")
"""Of ``torch.cuda``; those of the CPU all come to its generator."""


@contextlib.contextmanager
def watch_random_state(recorder: Recorder) -> Iterator[None]:
    """Reports random states that are copied (as by checkpoints) or set to a recorder.

    States are real tensors, made without an operator. Nothing is set: fake tensors draw nothing,
    and the generators are the user's.
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


@contextlib.contextmanager
def _replace(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


class _WatchedGenerator:
    """Stands for the CPU's generator, which stays unchanged."""

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


@contextlib.contextmanager
def replace_inference_mode() -> Iterator[None]:
    """Replaces ``torch.inference_mode`` with ``no_grad`` and its other effects, in this thread.

    The real one leaves autograd's keys out of the dispatcher. Then composite operators reach a
    ``TorchDispatchMode`` whole, and some views of fake tensors that were made outside fail. Memory
    depends on two effects that are kept: autocast keeps no casts of weights, and autograd records
    nothing, whatever ``enable_grad`` says. Source: ``c10/core/InferenceMode.h``; ``cached_cast`` in
    ``aten/src/ATen/autocast_mode.cpp``, https://github.com/pytorch/pytorch/pull/165068.

    >>> with replace_inference_mode(), torch.inference_mode():
    ...     torch.is_inference_mode_enabled(), torch.zeros(1).is_inference()
    (True, False)
    """
    thread = threading.get_ident()
    guard, set_grad_enabled = torch._C._InferenceMode, torch._C._set_grad_enabled
    set_cache_enabled = torch.set_autocast_cache_enabled
    is_enabled = torch.is_inference_mode_enabled
    is_on, caches_outside = False, True

    @contextlib.contextmanager
    def enter(mode: bool) -> Iterator[None]:
        nonlocal is_on, caches_outside
        before = is_on, torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
        if not is_on:
            caches_outside = torch.is_autocast_cache_enabled()
        is_on = mode
        set_grad_enabled(not mode)
        set_cache_enabled(caches_outside and not mode)
        try:
            yield
        finally:
            is_on, has_grad, caches = before
            set_grad_enabled(has_grad)
            set_cache_enabled(caches)

    def is_here() -> bool:
        return threading.get_ident() == thread

    def make_guard(mode: bool) -> Any:
        return enter(mode) if is_here() else guard(mode)

    def set_grad(enabled: bool) -> None:
        set_grad_enabled(enabled and not (is_on and is_here()))

    def set_cache(enabled: bool) -> None:
        set_cache_enabled(enabled and not (is_on and is_here()))

    torch._C._InferenceMode = make_guard  # type: ignore[assignment,misc]
    torch._C._set_grad_enabled = set_grad
    torch.set_autocast_cache_enabled = set_cache
    torch.is_inference_mode_enabled = lambda: is_on if is_here() else is_enabled()
    try:
        yield
    finally:
        torch._C._InferenceMode = guard  # type: ignore[misc]
        torch._C._set_grad_enabled = set_grad_enabled
        torch.set_autocast_cache_enabled = set_cache_enabled
        torch.is_inference_mode_enabled = is_enabled


@contextlib.contextmanager
def stop_garbage_collection() -> Iterator[None]:
    """Frees no reference cycles within, so that a recording is the same every time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
