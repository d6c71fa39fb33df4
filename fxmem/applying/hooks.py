"""Forward hooks of modules whose code runs a second time in backward.

A hook that only looks, as one that logs or counts, is called once for each call that the user's
code makes. One that changes what the module takes or gives is part of what is computed, and is
called again; so is one that draws random numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxmem.applying.random_numbers import RandomNumbers, iterate_generators
from fxmem.applying.versions import find_memory
from fxmem.recording.operators import find_written

_Table = MutableMapping[int, Callable[..., Any]]

_EVERY_MODULES: tuple[_Table, ...] = (
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_forward_hooks,
)


class ForwardHooks:
    """The forward hooks of a model, during one step.

    Args:
        tables: What modules have them in; global ones are added.

    Attributes:
        changing: Those found to change something, by table and key.
    """

    def __init__(self, tables: Sequence[_Table]) -> None:
        self.changing: set[tuple[int, int]] = set()
        self._tables = [*tables, *(table for table in _EVERY_MODULES if table)]

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Finds out which hooks change something."""
        with self._replace(self._watch_hook):
            yield

    @contextlib.contextmanager
    def skip_onlookers(self) -> Iterator[None]:
        """Leaves out those that were found to change nothing."""
        with self._replace(self._skip_onlooker):
            yield

    @contextlib.contextmanager
    def _replace(
        self, choose: Callable[[tuple[int, int], Callable[..., Any]], Callable[..., Any]]
    ) -> Iterator[None]:
        # In the tables themselves: handles of hooks refer to those.
        originals = [dict(table) for table in self._tables]
        for table in self._tables:
            for key, hook in table.items():
                table[key] = choose((id(table), key), hook)
        try:
            yield
        finally:
            for table, hooks in zip(self._tables, originals, strict=True):
                for key in table.keys() & hooks.keys():  # some may be gone, some new
                    table[key] = hooks[key]

    def _watch_hook(self, place: tuple[int, int], hook: Callable[..., Any]) -> Callable[..., Any]:
        def watched(module: nn.Module, *arguments: Any) -> Any:
            before = _take_attributes(module)
            numbers = RandomNumbers(iterate_generators(pytree.tree_leaves(arguments)))
            with _SeeWrites((arguments, dict(module._buffers))) as writes:
                result = hook(module, *arguments)
            numbers.settle()
            is_changing = result is not None or writes.has_any or _take_attributes(module) != before
            if is_changing or numbers.are_drawn:  # without them, those drawn later are others
                self.changing.add(place)
            return result

        return watched

    def _skip_onlooker(
        self, place: tuple[int, int], hook: Callable[..., Any]
    ) -> Callable[..., Any]:
        return hook if place in self.changing else _do_nothing


def _do_nothing(*_: Any) -> None:
    return None


class _SeeWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds out whether some tensors are changed in place, ``tensor.data`` too.

    Args:
        values: Hold the tensors.
    """

    def __init__(self, values: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        leaves = pytree.tree_leaves(values)
        self._memory = {find_memory(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        self.has_any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = map(find_memory, find_written(func, args, kwargs or {}))
        self.has_any = self.has_any or not self._memory.isdisjoint(written)
        return func(*args, **(kwargs or {}))


def _take_attributes(module: nn.Module) -> tuple[Any, ...]:
    """What tells whether the module comes to refer to others."""
    buffers = tuple(map(id, module._buffers.values()))
    return (*buffers, *((name, id(value)) for name, value in vars(module).items()))
