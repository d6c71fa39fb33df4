"""The one place that replaces attributes of torch and of other libraries, for a while."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from fxmem.versions.interfaces import find_owner
from fxmem.versions.patches import PATCHES

_ABSENT = object()
_LISTED = frozenset((row.owner, name) for row in PATCHES for name in row.names)
_held = threading.RLock()


@dataclass(eq=False)
class _Replacement:
    """An attribute that is replaced, with the value that it had before."""

    owner: Any
    name: str
    value: Any
    before: Any = _ABSENT


_applied: list[_Replacement] = []
"""What is replaced, in order."""
_marks: list[int] = []
"""For each time that the process is held: how much was replaced before."""
_left = 0
_undone: list[tuple[list[_Replacement], list[tuple[Any, Any]]]] = []
"""For each recording that is left: what it had replaced, and its modes with their stacks."""


@contextlib.contextmanager
def hold_process() -> Iterator[None]:
    """Keeps other analyses waiting, as each patches torch, and frees no reference cycles within.

    So a recording is the same every time.
    """
    with _held:
        enabled = gc.isenabled()
        gc.disable()
        _marks.append(len(_applied))
        try:
            yield
        finally:
            _marks.pop()
            if enabled:
                gc.enable()


@contextlib.contextmanager
def patch(replacements: Mapping[Any, Mapping[str, Any]]) -> Iterator[None]:
    """Replaces attributes within, and puts back what was there, in reverse order.

    To be entered within :func:`hold_process` where code of other threads may analyse, too.

    Args:
        replacements: By module, class or object, the new values by name. Those of torch's modules
            and classes are listed in :data:`fxmem.versions.patches.PATCHES`.

    Raises:
        LookupError: A name of torch is not listed.

    >>> import torch
    >>> with patch({torch.cuda: {"is_available": lambda: "perhaps"}}):
    ...     torch.cuda.is_available()
    'perhaps'
    """
    with contextlib.ExitStack() as stack:
        for owner, values in replacements.items():
            path = find_path(owner)
            for name, value in values.items():
                if path.partition(".")[0] == "torch" and not _is_listed(owner, name):
                    raise LookupError(f"{path}.{name} is not listed in fxmem/versions/patches.py")
                replacement = _Replacement(owner, name, value)
                _replace(replacement)
                stack.callback(_undo, replacement)
        yield


def _replace(replacement: _Replacement) -> None:
    owner, name = replacement.owner, replacement.name
    replacement.before = vars(owner).get(name, _ABSENT)
    _applied.append(replacement)
    setattr(owner, name, replacement.value)


def _undo(replacement: _Replacement) -> None:
    """Puts back what was there; not always the last, where an import within made others."""
    at = _applied.index(replacement)
    for later in _applied[at + 1 :]:
        if later.owner is replacement.owner and later.name == replacement.name:
            later.before = replacement.before
            break
    else:
        if replacement.before is _ABSENT:
            delattr(replacement.owner, replacement.name)
        else:
            setattr(replacement.owner, replacement.name, replacement.before)
    del _applied[at]


@contextlib.contextmanager
def leave_recording() -> Iterator[None]:
    """Undoes what a recording replaced, and leaves all modes: for an analysis in recorded code.

    To be entered within the analysis's own :func:`hold_process`.

    Hooks of the recording that stay see by :func:`count_left` that theirs is not the innermost.
    """
    global _left
    first = _marks[0] if _marks else len(_applied)
    applied = _applied[first:]
    _read_current(applied)
    if not applied:
        yield
        return
    import torch  # which takes a second, and is there where anything is replaced

    functions: Any = torch.overrides
    operators: Any = torch.utils._python_dispatch
    modes = [(functions, mode) for mode in functions._get_current_function_mode_stack()]
    with contextlib.ExitStack() as stack:
        for _ in modes:
            stack.enter_context(functions._pop_mode_temporarily())
        modes += [
            (operators, mode)
            for mode in reversed(stack.enter_context(operators._disable_current_modes()))
        ]
        stack.enter_context(torch.enable_grad())
        for replacement in reversed(applied):
            _undo(replacement)
        _left += 1
        _undone.append((applied, modes))
        try:
            yield
        finally:
            _undone.pop()
            _left -= 1
            _apply_again(applied)


@contextlib.contextmanager
def resume_recording() -> Iterator[None]:
    """Goes back into the recording that :func:`leave_recording` has left, within."""
    global _left
    applied, modes = _undone[-1]
    with contextlib.ExitStack() as stack:
        _apply_again(applied)
        for modes_of, mode in modes:  # without entering them: selective checkpoints would restart
            modes_of._push_mode(mode)
            stack.callback(modes_of._pop_mode)
        _left -= 1
        try:
            yield
        finally:
            _left += 1
            stack.close()
            for replacement in reversed(applied):
                _undo(replacement)


def _read_current(applied: list[_Replacement]) -> None:
    """Reads what replaced attributes are now: a script may have set ``sys.argv`` itself."""
    for last in {(id(each.owner), each.name): each for each in applied}.values():
        last.value = vars(last.owner).get(last.name, last.value)


def _apply_again(applied: list[_Replacement]) -> None:
    for replacement in applied:
        _replace(replacement)


def is_own_mode(mode: object) -> bool:
    """Returns whether a mode of torch's is the recording's, and not the code's."""
    return type(mode).__module__.startswith("fxmem.")


def count_left() -> int:
    """Counts the recordings that are left for an analysis within them."""
    return _left


def _is_listed(owner: Any, name: str) -> bool:
    if (find_path(owner), name) in _LISTED:
        return True
    # Some releases say of a class in C++ that another module defines it.
    return any(name in row.names and find_owner(row.owner) is owner for row in PATCHES)


def find_path(owner: Any) -> str:
    """Finds the dotted path of a module or a class, as its own names tell it."""
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}"
    return getattr(owner, "__name__", "")


@contextlib.contextmanager
def change_items(
    table: MutableMapping[str, Any], changes: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Changes items of a table, such as the environment's variables, and puts all back at the end.

    >>> table = {"a": 1}
    >>> with change_items(table, {"a": 2, "b": 3}):
    ...     table
    {'a': 2, 'b': 3}
    >>> table
    {'a': 1}
    """
    before = dict(table)
    try:
        table.update(changes or {})
        yield
    finally:
        table.clear()
        table.update(before)
