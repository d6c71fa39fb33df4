"""Log of the calls of a model's modules: nodes, storages, and whether each can run twice."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fxmem.graph import ModuleCall
from fxmem.tracing.state import DRAWS, Snapshot, read_random_states, take_snapshot


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


@dataclass(frozen=True, slots=True)
class _OpenCall:
    """A call whose ``forward`` runs."""

    start: int
    inputs: tuple[int, ...]
    arguments: Snapshot
    own: Snapshot
    random: tuple[Any, ...]


class CallLog:
    """Writes down the calls of modules while the model runs.

    A call is noted from the beginning to the end of its ``forward``, between the module's own
    hooks.

    Args:
        find_storages: Finds the indices of the storages that the tensors in a value lie on.
        count_nodes: Counts the nodes so far.

    Attributes:
        calls: The calls, those that ended first before others.
        hidden: The modules whose calls lie within one node, or in the loss, at least once.
    """

    def __init__(
        self, find_storages: Callable[[Any], tuple[int, ...]], count_nodes: Callable[[], int]
    ) -> None:
        self.calls: list[ModuleCall] = []
        self.hidden: set[str] = set()
        self._find_storages = find_storages
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
            inputs=self._find_storages((args, kwargs)),
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
        results = self._find_storages(result)
        stop = self._count_nodes()
        self.calls.append(ModuleCall(fqn, opened.start, stop, opened.inputs, results, reason))
