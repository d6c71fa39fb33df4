"""Calls that the tracer intercepts, and the log of the calls of a model's modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import nn

from fxmem.graph import ModuleCall
from fxmem.tracing.state import DRAWS, Snapshot, read_random_states, take_snapshot


class CallHandler(Protocol):
    """Runs calls in the place of PyTorch; the first argument of each is what it replaces."""

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
    """Runs a segment that a plan has recomputed in backward; to tracers one node."""
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
    """Yields the names that ``forward`` gives to its arguments, with their values."""
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


# -- the log ---------------------------------------------------------------------------------------


class StorageFinder(Protocol):
    """Knows the storages of a step."""

    def find_storages(self, value: Any) -> tuple[int, ...]:
        """Finds the indices of those that the tensors in a value lie on."""


@dataclass(frozen=True, slots=True)
class _OpenCall:
    """A call whose ``forward`` runs."""

    start: int
    inputs: tuple[int, ...]
    arguments: Snapshot
    own: Snapshot
    random: tuple[Any, ...]


class CallLog:
    """Writes down the calls of modules while the model runs: nodes, storages, whether repeatable.

    A call is noted from the beginning to the end of its ``forward``, between the module's own
    hooks.

    Args:
        finder: Finds the storages of values.
        count_nodes: Counts the nodes so far.

    Attributes:
        calls: The calls, those that ended first before others.
        hidden: The modules whose calls lie within one node, or in the loss, at least once.
    """

    def __init__(self, finder: StorageFinder, count_nodes: Callable[[], int]) -> None:
        self.calls: list[ModuleCall] = []
        self.hidden: set[str] = set()
        self._finder = finder
        self._count_nodes = count_nodes

    def run(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        fqn: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_leaf: bool,
    ) -> Any:
        """Calls a module and writes the call down.

        Args:
            call: Calls the module, which comes first among its arguments.
            module: The module.
            fqn: Its name in the model.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            is_leaf: Whether the call is one node, hooks included.
        """
        has_hooks = bool(module._forward_hooks or module._forward_pre_hooks)
        if is_leaf or not has_hooks:
            opened = self._open(module, args, kwargs)
            result = call(module, *args, **kwargs)
            reason = "hooks run with it" if has_hooks else ""
            self._close(opened, module, fqn, (args, kwargs), result, reason)
            return result
        begun: list[_OpenCall] = []

        def see_begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            begun.append(self._open(module, args, kwargs))

        def see_end(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            self._close(begun.pop(), module, fqn, (args, kwargs), result)

        handles = (
            module.register_forward_pre_hook(see_begin, with_kwargs=True),
            module.register_forward_hook(see_end, prepend=True, with_kwargs=True),
        )
        try:
            return call(module, *args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()

    def _open(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> _OpenCall:
        return _OpenCall(
            start=self._count_nodes(),
            inputs=self._finder.find_storages((args, kwargs)),
            arguments=take_snapshot((*args, *kwargs.values())),
            own=take_snapshot(vars(module).values()),
            random=read_random_states(),
        )

    def _close(
        self,
        opened: _OpenCall,
        module: nn.Module,
        fqn: str,
        arguments: tuple[tuple[Any, ...], Mapping[str, Any]],
        result: Any,
        reason: str = "",
    ) -> None:
        args, kwargs = arguments
        if opened.random != read_random_states():
            reason = DRAWS
        elif opened.arguments != take_snapshot((*args, *kwargs.values())):
            reason = "it changes an object that it is given, such as a cache"
        elif opened.own != take_snapshot(vars(module).values()):
            reason = "it changes what its module holds"
        results = self._finder.find_storages(result)
        stop = self._count_nodes()
        self.calls.append(ModuleCall(fqn, opened.start, stop, opened.inputs, results, reason))
