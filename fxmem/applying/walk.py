"""A model's modules, as each call looks at them: walked once, and again where one was replaced."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn
from torch.utils.module_tracker import ModuleTracker

from fxmem.tracing.hooks import CALLED_HOOKS, GLOBAL_HOOKS
from fxmem.tracing.signatures import Kind, Tie, list_kinds


class Walk:
    """The modules of a model, and the tables that they hold.

    Args:
        model: The model.
        entered: The names of modules whose hooks the model's code calls, and a graph does not.
        attributes: Where code reads tensors by itself.

    Attributes:
        modules: Each once, the model first.
    """

    modules: list[nn.Module]
    _childless: list[dict[str, Any]]
    _children: list[tuple[dict[str, Any], list[Any]]]

    def __init__(
        self, model: nn.Module, entered: Collection[str] = (), attributes: Collection[str] = ()
    ) -> None:
        self._model = model
        self._entered = entered
        self._attributes = attributes
        self._collect()

    def _collect(self) -> None:
        named = dict(self._model.named_modules(remove_duplicate=False))
        self.modules = [*dict.fromkeys(named.values())]
        children = [module._modules for module in self.modules]
        self._children = [(table, [*table.values()]) for table in children if table]
        self._childless = [table for table in children if not table]
        self._parameters: list[dict[str, Any]] = [module._parameters for module in self.modules]
        self._buffers: list[dict[str, Any]] = [module._buffers for module in self.modules]
        owners = ((name.rpartition(".")[0], name.rpartition(".")[2]) for name in self._attributes)
        self._read: list[tuple[dict[str, Any], str]] = [
            (named[owner].__dict__, name) for owner, name in owners if owner in named
        ]
        self._forward_hooks = [
            table for m in self.modules for table in (m._forward_pre_hooks, m._forward_hooks)
        ]
        self._uncalled = [
            (name, getattr(module, key))
            for name, module in named.items()
            if name in self._entered
            for key in CALLED_HOOKS
        ]
        self._uncalled_hooks = [table for _, table in self._uncalled]

    def update(self) -> bool:
        """Looks for modules that were replaced, added or taken away; whether any was."""
        same = not any(self._childless) and all(
            len(table) == len(children) and all(map(operator.is_, table.values(), children))
            for table, children in self._children
        )
        if not same:
            self._collect()
        return not same

    def __getstate__(self) -> Any:
        return self._model, self._entered, self._attributes

    def __setstate__(self, state: Any) -> None:
        # The model itself may not be there yet: the first look is that of the first call.
        self._model, self._entered, self._attributes = state
        self._childless, self._children = [{"": self._model}], []

    def find_hooked(self) -> str:
        """An entered module with hooks; empty for none."""
        if not any(self._uncalled_hooks):
            return ""
        return next(str(name) for name, table in self._uncalled if table)

    def find_unseen(self) -> str:
        """An entered module, where there are hooks on all modules; empty for none."""
        return min(self._entered) if self._entered and are_all_watched() else ""

    def list_kinds(self) -> tuple[Kind, ...]:
        """Those of parameters and buffers; see :func:`fxmem.tracing.signatures.list_kinds`."""
        return list_kinds(self._parameters, self._buffers)

    def find_untied(self, ties: Iterable[Tie]) -> tuple[Tie, ...]:
        """Which parameters and buffers that were one tensor are not any more.

        Args:
            ties: From :func:`fxmem.tracing.signatures.list_ties`, of all parameters and buffers.
        """
        if not ties:
            return ()
        held = [t for table in (*self._parameters, *self._buffers) for t in table.values()]
        return tuple([tie for tie in ties if max(tie) >= len(held) or not _is_one(held, tie)])

    def count_buffers(self) -> int:
        """How many there are; hooks that normalise a weight, as those of old, add some."""
        return sum(map(len, self._buffers))

    def list_tables(self) -> list[dict[str, Any]]:
        """The tables of parameters, buffers and modules that are not empty."""
        children = [table for table, _ in self._children]
        return [table for table in (*self._parameters, *self._buffers, *children) if table]

    def list_plain(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Attributes that code reads tensors from and that are no buffers, with what is there."""
        return [(table, {name: table[name]}) for table, name in self._read if name in table]

    def list_forward_hooks(self) -> list[Any]:
        """The tables of forward hooks that are not empty."""
        return [table for table in self._forward_hooks if table]


def are_all_watched() -> bool:
    """Whether there are hooks on all modules.

    PyTorch's own that only note where a call is, as its counters of FLOPs do, are left out.
    """
    if not any(GLOBAL_HOOKS):
        return False
    hooks = (hook for table in GLOBAL_HOOKS for hook in table.values())
    return any(not isinstance(getattr(hook, "__self__", None), ModuleTracker) for hook in hooks)


def _is_one(tensors: list[Any], tie: Tie) -> bool:
    return tensors[tie[0]] is tensors[tie[1]]
