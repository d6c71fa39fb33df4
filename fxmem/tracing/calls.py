"""Calls that a tracer takes the place of, and the names of a call's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import nn


class CallHandler(Protocol):
    """What runs a call in the place of PyTorch; the first argument is what it replaces."""

    def call_module(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """For ``nn.Module.__call__``."""

    def call_autograd_function(
        self,
        apply: Callable[..., Any],
        function: type[torch.autograd.Function],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """For ``torch.autograd.Function.apply``."""

    def call_segment(self, run: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        """For :func:`run_segment`."""

    def call_checkpoint(
        self,
        generator: Callable[..., Iterator[None]],
        settings: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Iterator[None]:
        """For the generator around a non-reentrant checkpoint."""


def run_segment(run: Callable[..., Any], *inputs: Any) -> Any:
    """Runs a segment that a plan has recomputed in backward; to tracers one node.

    Args:
        run: The first run of the segment.
        inputs: What the segment takes.
    """
    return run(*inputs)


@contextmanager
def patch_calls(handler: CallHandler) -> Iterator[None]:
    """Routes module calls, autograd Functions and checkpoints through the handler."""
    checkpointing = torch.utils.checkpoint
    call_module = nn.Module.__call__
    apply = torch.autograd.Function.__dict__["apply"]
    generator = checkpointing._checkpoint_without_reentrant_generator
    segment = globals()["run_segment"]

    def traced_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return handler.call_module(call_module, module, args, kwargs)

    def traced_apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        return handler.call_autograd_function(apply.__get__(None, function), function, args, kwargs)

    def traced_checkpoint(*arguments: Any, **kwargs: Any) -> Iterator[None]:
        # fn, preserve_rng_state, context_fn, determinism_check, debug, early_stop, *args
        return handler.call_checkpoint(generator, arguments[:6], arguments[6:], kwargs)

    def traced_segment(run: Callable[..., Any], *inputs: Any) -> Any:
        return handler.call_segment(run, inputs)

    nn.Module.__call__ = traced_call  # type: ignore[method-assign]
    torch.autograd.Function.apply = classmethod(traced_apply)  # type: ignore[assignment]
    checkpointing._checkpoint_without_reentrant_generator = traced_checkpoint
    globals()["run_segment"] = traced_segment
    try:
        yield
    finally:
        nn.Module.__call__ = call_module  # type: ignore[method-assign]
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        checkpointing._checkpoint_without_reentrant_generator = generator
        globals()["run_segment"] = segment


def bind_arguments(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The names that ``forward`` gives to its arguments, with their values."""
    try:
        signature = inspect.signature(model.forward)
        bound = signature.bind(*args, **kwargs)
    except (TypeError, ValueError):  # no signature, or one that does not fit: forward will say
        yield from ((f"input_{i}", value) for i, value in enumerate(args))
        yield from kwargs.items()
        return
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            yield from ((f"{name}_{i}", element) for i, element in enumerate(value))
        elif kind is inspect.Parameter.VAR_KEYWORD:
            yield from value.items()
        else:
            yield name, value
