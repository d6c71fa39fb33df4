"""The calls of a model's modules: which nodes each made, of what, and whether it can run twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from fxmem.graph import ModuleCall
from fxmem.tracing.changes import Snapshot, is_same, take_snapshot
from fxmem.tracing.generators import DRAWS, read_random_states

_CHANGES_ITSELF = "it changes what its module holds"
_CHANGES_ARGUMENT = "it changes an object that it is given, such as a cache"
_HAS_HOOKS = "hooks run with it"


class StorageFinder(Protocol):
    """What knows the storages of a step."""

    def find_storages(self, value: Any) -> tuple[int, ...]:
        """The indices of those that the tensors in a value lie on."""


@dataclass(slots=True)
class _OpenCall:
    """A call whose ``forward`` runs."""

    start: int
    inputs: tuple[int, ...]
    arguments: Snapshot
    own: Snapshot
    random: tuple[Any, ...]


class CallLog:
    """Writes down the calls of modules while the model runs.

    What is noted is the ``forward``, between the module's own hooks.

    Args:
        finder: What knows the storages.
        count_nodes: How many nodes there are so far.

    Attributes:
        calls: What was called, those that ended first before others.
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
            call: Calls it: the module comes first.
            module: The module.
            fqn: Its name in the model.
            args: What it is called with.
            kwargs: Likewise, by name.
            is_leaf: Whether the call is one node, hooks included.
        """
        has_hooks = bool(module._forward_hooks or module._forward_pre_hooks)
        if has_hooks and not is_leaf:
            return self._run_between_hooks(call, module, fqn, args, kwargs)
        opened = self._open(module, args, kwargs)
        result = call(module, *args, **kwargs)
        self._close(opened, module, fqn, (args, kwargs), result, _HAS_HOOKS if has_hooks else "")
        return result

    def _run_between_hooks(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        fqn: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        opened: list[_OpenCall] = []

        def see_begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            opened.append(self._open(module, args, kwargs))

        def see_end(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            self._close(opened.pop(), module, fqn, (args, kwargs), result, "")

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
        reason: str,
    ) -> None:
        args, kwargs = arguments
        if not is_same(opened.own, take_snapshot(vars(module).values())):
            reason = _CHANGES_ITSELF
        if not is_same(opened.arguments, take_snapshot((*args, *kwargs.values()))):
            reason = _CHANGES_ARGUMENT
        if opened.random != read_random_states():
            reason = DRAWS
        results = self._finder.find_storages(result)
        stop = self._count_nodes()
        self.calls.append(ModuleCall(fqn, opened.start, stop, opened.inputs, results, reason))
