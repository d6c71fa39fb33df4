"""Files that code writes fake tensors to: kept apart, and found where the code looks for them."""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from fxmem.patching import patch

_READERS = ("stat", "access", "chmod", "utime", "listxattr", "getxattr", "setxattr")
"""Functions of ``os`` that take the path of a file that is there: ``shutil.copy2`` calls all."""

HEAD = b"shapes alone, of fxmem\n"
"""Begins a file that stands for one that has values, too."""


def read_shapes(path: Any) -> bytes | None:
    """Reads what follows the head of a file of shapes; None for any other, and where none is."""
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return file.read() if file.read(len(HEAD)) == HEAD else None


class FakeFiles:
    """Files in a folder of their own, each under the path that the code knows it by.

    Nothing on the disk is replaced or removed in their stead.
    """

    def __init__(self) -> None:
        self._files: dict[str, str] = {}  # by absolute path
        self._folder = ""
        self._count = 0
        self._stack = contextlib.ExitStack()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Removes the files in the end."""
        with self._stack:
            yield

    def write(self, path: Any, data: bytes, nbytes: int = 0) -> None:
        """Keeps what code writes to a path, and so many zeros after it, which take no room.

        From the first file on, functions of ``os`` find it.
        """
        if not self._folder:
            self._folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="fxmem-"))
            self._stack.enter_context(patch(self._make_replacements()))
        self._count += 1
        kept = os.path.join(self._folder, str(self._count))
        with open(kept, "wb") as file:
            file.write(data)
            file.truncate(len(data) + nbytes)
        self._files[_find_key(path)] = kept

    def find(self, path: Any) -> str | None:
        """Finds the file that stands for one; None for one on the disk, if any."""
        if not self._files or not isinstance(path, str | bytes | os.PathLike):
            return None
        return self._files.get(_find_key(path))

    def forget(self, path: Any) -> None:
        """Forgets a file that something else is written to."""
        if self.find(path):
            del self._files[_find_key(path)]

    def _make_replacements(self) -> dict[Any, dict[str, Any]]:
        opened = self._redirect_open(io.open)
        readers = {
            name: self._redirect(getattr(os, name)) for name in _READERS if hasattr(os, name)
        }
        moves = {name: self._redirect_move(getattr(os, name)) for name in ("rename", "replace")}
        removals = {
            name: self._redirect_removal(getattr(os, name)) for name in ("remove", "unlink")
        }
        return {
            os: readers | moves | removals,
            shutil: {"copyfile": self._redirect_copy(shutil.copyfile)},
            builtins: {"open": opened},
            io: {"open": opened},
        }

    def _redirect(self, read: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(read)
        def read_kept(path: Any, *args: Any, **kwargs: Any) -> Any:
            return read(self.find(path) or path, *args, **kwargs)

        return read_kept

    def _redirect_open(self, open_file: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(open_file)
        def open_kept(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if "w" in mode:
                self.forget(file)
            return open_file(self.find(file) or file, mode, *args, **kwargs)

        return open_kept

    def _redirect_move(self, move: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(move)
        def move_kept(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            if self.find(source) is None:  # perhaps a folder of such files
                move(source, target, *args, **kwargs)
                self.forget(target)
            if self._files:
                before, after = _find_key(source), _find_key(target)
                for path in [
                    p for p in self._files if p == before or p.startswith(before + os.sep)
                ]:
                    self._files[after + path.removeprefix(before)] = self._files.pop(path)

        return move_kept

    def _redirect_removal(self, remove: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(remove)
        def remove_kept(path: Any, *args: Any, **kwargs: Any) -> None:
            if self.find(path) is None:
                remove(path, *args, **kwargs)
            self.forget(path)

        return remove_kept

    def _redirect_copy(self, copy: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(copy)
        def copy_kept(source: Any, target: Any, **kwargs: Any) -> Any:
            kept = self.find(source)
            if kept is None:
                return copy(source, target, **kwargs)
            self._files[_find_key(target)] = kept
            return target

        return copy_kept


def _find_key(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path))
