"""Autograd's engine, watched where Python starts it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from fxmem.patching import patch


def watch_engine(
    begin: Callable[[Any], None], run_engine: Callable[[Callable[..., Any], Any, Any], Any]
) -> AbstractContextManager[None]:
    """Makes a context that watches each ``backward`` and ``torch.autograd.grad``.

    Args:
        begin: Is told of the tensors that gradients are wanted of, before the first gradients are
            made.
        run_engine: Is given the engine's function, and its positional and keyword arguments.
    """
    namespace: Any = torch.autograd
    run, make_gradients = namespace._engine_run_backward, namespace._make_grads

    def make_watched(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        begin(outputs)
        return make_gradients(outputs, *args, **kwargs)

    def run_watched(*args: Any, **kwargs: Any) -> Any:
        return run_engine(run, args, kwargs)

    return patch({namespace: {"_make_grads": make_watched, "_engine_run_backward": run_watched}})
