"""What a segment that runs again in backward needs of the call that it ran in first.

Between the two, ``torch.func.functional_call`` has taken its tensors out of the model, hooks have
been called, and the model may be in ``eval()``, or have another layer in the place of one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from fxmem.applying.attributes import put_back
from fxmem.applying.hooks import ForwardHooks
from fxmem.applying.walk import Walk


class ModelCall:
    """One call of a model: its hooks, and the tensors and modules that it finds in its modules.

    Args:
        walk: Of the model that is called, as it is now.
    """

    def __init__(self, walk: Walk) -> None:
        self._hooks = ForwardHooks(walk.list_forward_hooks())
        self._tables = [(table, table.copy()) for table in walk.list_tables()]
        self._tables += walk.list_plain()
        self._modes = [(module, module.training) for module in walk.modules]

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """While the model runs, what it calls finds this call; see :func:`find_call`."""
        token = _current.set(self)
        try:
            with self._hooks.watch():
                yield
        finally:
            _current.reset(token)

    @contextlib.contextmanager
    def repeat(self) -> Iterator[None]:
        """Has modules find the tensors, modules and mode that they had; no onlooking hook runs."""
        changed = [
            (table, then, table.copy())
            for table, then in self._tables
            if any(table.get(name) is not held for name, held in then.items())
        ]
        for table, then, _ in changed:
            put_back(table, {**table, **then})
        switched = [module for module, mode in self._modes if module.training is not mode]
        for module in switched:
            module.training = not module.training
        try:
            with self._hooks.skip_onlookers():
                yield
        finally:
            for table, _, now in changed:
                put_back(table, now)
            for module in switched:
                module.training = not module.training


_current: ContextVar[ModelCall | None] = ContextVar("current", default=None)


def find_call() -> ModelCall | None:
    """The call of a planned model that runs; None outside of one."""
    return _current.get()
