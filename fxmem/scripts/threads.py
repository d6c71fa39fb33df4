"""Threads that a script starts, recorded as the one that runs the script is.

PyTorch's modes are those of a thread: in a new one nothing would stand for the GPU. Loaders of
checkpoints move weights to the GPU in threads, and prefetchers batches.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fxmem.patching import patch


def follow_threads(
    watch: Callable[[], AbstractContextManager[None]],
) -> AbstractContextManager[None]:
    """Lets threads that are started within run in the modes of this one.

    Args:
        watch: Makes a context that the threads run in besides.
    """
    start = threading.Thread.start
    list_modes: tuple[Any, ...] = _get_current_dispatch_mode_stack, _get_current_function_mode_stack
    modes = [mode for list_stack in list_modes for mode in list_stack()]

    def start_followed(thread: threading.Thread) -> None:
        run, variables = thread.run, contextvars.copy_context()

        def run_followed() -> None:
            with contextlib.ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                stack.enter_context(watch())
                run()

        thread.run = functools.partial(variables.run, run_followed)  # type: ignore[method-assign]
        start(thread)

    return patch({threading.Thread: {"start": start_followed}})
