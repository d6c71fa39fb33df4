"""``torch.inference_mode`` in a step that is recorded, where it is ``no_grad`` and what follows.

The real one leaves autograd's keys out of the dispatcher. Then operators that are composed of
others reach a ``TorchDispatchMode`` whole, without what they are composed of, and some views of
fake tensors that were made outside fail. Kept of it is what memory depends on: autocast keeps no
casts of weights, and nothing is recorded by autograd, whatever ``enable_grad`` says.

Source: ``c10/core/InferenceMode.h``; ``cached_cast`` in ``aten/src/ATen/autocast_mode.cpp``, since
https://github.com/pytorch/pytorch/pull/165068.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def replace_inference_mode() -> Iterator[None]:
    """Replaces inference mode within, for code of this thread.

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
