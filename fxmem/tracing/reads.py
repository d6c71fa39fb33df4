"""Which attributes of modules are read, while someone asks."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

Note = Callable[[nn.Module, str, dict[str, Any]], None]
"""Is given a module, what is read of it, and the globals of the code that reads it."""


@contextlib.contextmanager
def watch_modules(note: Note) -> Iterator[None]:
    """Tells of what is read of modules meanwhile, in any thread.

    Args:
        note: Is told. What it reads of modules by itself, it is told of again.
    """
    _watch.begin(note)
    try:
        yield
    finally:
        _watch.end(note)


class _Watch:
    """Tells all who ask at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asking: tuple[Note, ...] = ()
        self._undo = contextlib.ExitStack()

    def begin(self, note: Note) -> None:
        with self._lock:
            if not self._asking:
                self._install()
            self._asking = (*self._asking, note)

    def end(self, note: Note) -> None:
        with self._lock:
            self._asking = tuple(other for other in self._asking if other is not note)
            if not self._asking:
                self._undo.close()

    def _install(self) -> None:
        before = vars(nn.Module).get("__getattribute__")
        get: Any = before or object.__getattribute__

        def read(module: nn.Module, name: str) -> Any:
            reader = sys._getframe(1).f_globals
            for note in self._asking:
                note(module, name, reader)
            return get(module, name)

        nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
        if before is None:
            self._undo.callback(delattr, nn.Module, "__getattribute__")
        else:
            self._undo.callback(setattr, nn.Module, "__getattribute__", before)


_watch = _Watch()


def find_package(reader: dict[str, Any]) -> str:
    """The package of the code that has these globals."""
    return str(reader.get("__name__", "")).split(".")[0]
