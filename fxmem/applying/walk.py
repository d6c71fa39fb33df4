"""A model's modules, as each call looks at them: walked once, and again where one was replaced."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

from torch import nn


class Walk:
    """The modules of a model, and the tables that they hold.

    Args:
        model: The model.
        attributes: Where code reads tensors by itself.

    Attributes:
        modules: Each once, the model first.
    """

    modules: list[nn.Module]
    _childless: list[dict[str, Any]]
    _children: list[tuple[dict[str, Any], list[Any]]]

    def __init__(self, model: nn.Module, attributes: Collection[str] = ()) -> None:
        self._model = model
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
        return self._model, self._attributes

    def __setstate__(self, state: Any) -> None:
        # The model itself may not be there yet: the first look is that of the first call.
        self._model, self._attributes = state
        self._childless, self._children = [{"": self._model}], []

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
