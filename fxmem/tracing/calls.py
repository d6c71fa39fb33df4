"""Log of the calls of a model's modules: nodes, storages, and whether each can run twice."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from fxmem.graph import ModuleCall
from fxmem.tracing.compiled import unwrap_compiled
from fxmem.tracing.state import DRAWS, read_random_states, take_snapshot

_FILLS_CACHE = "it changes an object that it is given, such as a cache (use_cache=False avoids one)"


def bind_arguments(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yields the names that ``forward`` gives to its arguments, with their values."""
    try:
        signature = inspect.signature(unwrap_compiled(model).forward)
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


class HasNodes(Protocol):
    """A log of nodes."""

    nodes: list[Any]


class CallLog:
    """Writes down the calls of modules while the model runs, without the modules' own hooks."""

    def __init__(self, find_storages: Callable[[Any], tuple[int, ...]], log: HasNodes) -> None:
        self.calls: list[ModuleCall] = []  # those that ended first before others
        self.hidden: set[str] = set()  # modules called within one node, or in the loss
        self._find_storages = find_storages
        self._log = log

    @contextmanager
    def watch(
        self,
        module: nn.Module,
        fqn: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_leaf: bool,
    ) -> Iterator[Callable[[Any], None]]:
        """Writes down the call of a module that runs within; with hooks if it is a leaf, one node.

        Yields:
            A function to be called with the result.
        """
        begun: list[tuple[int, tuple[int, ...], dict[str, Any]]] = []

        def see_begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            state = _read_state(module, args, kwargs)
            begun.append((len(self._log.nodes), self._find_storages((args, kwargs)), state))

        def see_end(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            start, inputs, before = begun.pop()
            now = _read_state(module, args, kwargs)
            obstacle = "hooks run with it" if has_hooks and is_leaf else ""
            obstacle = next((name for name in now if now[name] != before[name]), obstacle)
            results, stop = self._find_storages(result), len(self._log.nodes)
            name = type(module).__name__
            self.calls.append(ModuleCall(fqn, start, stop, inputs, results, obstacle, name))

        has_hooks = bool(module._forward_hooks or module._forward_pre_hooks)
        if is_leaf or not has_hooks:
            see_begin(module, args, kwargs)
            yield lambda result: see_end(module, args, kwargs, result)
            return
        handles = (
            module.register_forward_pre_hook(see_begin, with_kwargs=True),
            module.register_forward_hook(see_end, prepend=True, with_kwargs=True),
        )
        try:
            yield lambda result: None
        finally:
            for handle in handles:
                handle.remove()


def _read_state(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Reads what a call that can run twice leaves as it was, by the obstacle where it does not."""
    # Snapshots end at modules, and the caches of transformers 4.49 are some.
    given = [vars(v) if isinstance(v, nn.Module) else v for v in (*args, *kwargs.values())]
    return {
        DRAWS: read_random_states(),
        _FILLS_CACHE: take_snapshot(given),
        "it changes what its module holds": take_snapshot(vars(module).values()),
    }
