"""The module that a TARGET names, imported, and the name in it, found."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import nn

from fxmem.errors import LoadError
from fxmem.graph import SourceLocation
from fxmem.tracing.source import is_user_file
from fxmem.tracing.targets import Target

_MOST_NAMES = 8


@contextlib.contextmanager
def import_target(target: Target) -> Iterator[ModuleType]:
    """The target's module; its folder stays importable within the context.

    The current folder is put on ``sys.path`` for good: a model may import from it when it runs.

    Raises:
        LoadError: There is none, or it cannot be imported.
    """
    cwd = os.getcwd()
    if "" not in sys.path and cwd not in sys.path:
        sys.path.insert(0, cwd)
    if not target.is_file:
        yield _import_module(target)
        return
    path = os.path.abspath(os.path.expanduser(target.where))
    if not os.path.isfile(path):
        raise _explain_missing_file(target, path)
    folder, name = _find_package(path)
    added = [] if folder in sys.path else [folder]
    sys.path[:0] = added
    try:
        yield _import_file(target, path, name)
    finally:
        for entry in added:
            with contextlib.suppress(ValueError):
                sys.path.remove(entry)


def _import_module(target: Target) -> ModuleType:
    importlib.invalidate_caches()
    try:
        return importlib.import_module(target.where)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if target.where == missing or target.where.startswith(missing + "."):
            raise _explain_missing_module(target, missing) from error
        raise _explain_failed_import(target, error) from error
    except (Exception, SystemExit) as error:
        raise _explain_failed_import(target, error) from error


def _import_file(target: Target, path: str, name: str) -> ModuleType:
    importlib.invalidate_caches()
    try:
        if "." in name:  # in a package: its siblings are imported relative to it
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise LoadError(f"{target.where!r} is no Python file", hint="name a .py file")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module
    except (LoadError, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:
        raise _explain_failed_import(target, error) from error


def _find_package(path: str) -> tuple[str, str]:
    """The folder to import a file from, and the name of its module there."""
    folder, filename = os.path.split(path)
    stem = filename.removesuffix(".py")
    if not os.path.isfile(os.path.join(folder, "__init__.py")):
        return folder, _find_free_name(stem, path)
    parts = [] if stem == "__init__" else [stem]
    while os.path.isfile(os.path.join(folder, "__init__.py")) and len(parts) < 32:
        folder, package = os.path.split(folder)
        parts.insert(0, package)
    name = ".".join(parts)
    known = sys.modules.get(parts[0])
    is_other = known is not None and not _lies_in(known, os.path.join(folder, parts[0]))
    is_importable = all(part.isidentifier() for part in parts) and not is_other
    return (folder, name) if is_importable else (folder, _find_free_name(stem, path))


def _lies_in(module: ModuleType, folder: str) -> bool:
    file = getattr(module, "__file__", None) or ""
    return os.path.realpath(file).startswith(os.path.realpath(folder) + os.sep)


def _find_free_name(stem: str, path: str) -> str:
    """The name of the file, unless another module has it: then one that no module has."""
    known = sys.modules.get(stem)
    is_free = known is None and stem not in sys.stdlib_module_names
    if is_free or getattr(known, "__file__", None) == path:
        return stem
    return f"{stem}_{hashlib.sha256(path.encode()).hexdigest()[:8]}"


def find_object(module: ModuleType, target: Target) -> Any:
    """What the target's dotted name means in the module.

    Raises:
        LoadError: There is no such name; offers those that are close, and the models there.
    """
    found: Any = module
    path = target.where
    for part in target.name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise LoadError(
                f"no {part!r} in {path!r}", hint=_suggest_names(found, part, module)
            ) from None
        except Exception as error:  # a module that imports on access
            raise _explain_failed_import(target, error) from error
        path = f"{path}.{part}" if ":" in path else f"{path}:{part}"
    return found


def _suggest_names(owner: object, name: str, module: ModuleType) -> str:
    public = [entry for entry in dir(owner) if not entry.startswith("_")]
    close = difflib.get_close_matches(name, public, n=3)
    if close:
        return f"did you mean {' or '.join(close)}?"
    models = [
        entry
        for entry, value in sorted(vars(owner).items() if hasattr(owner, "__dict__") else [])
        if isinstance(value, nn.Module)
        or (inspect.isclass(value) and issubclass(value, nn.Module) and value is not nn.Module)
    ]
    if not models:
        return "there is no nn.Module in it"
    more = ", ..." if len(models) > _MOST_NAMES else ""
    return f"models there: {', '.join(models[:_MOST_NAMES])}{more}"


def find_user_line(error: BaseException) -> SourceLocation | None:
    """The innermost line of the user's own code that an error passed through.

    Installed packages count only where nothing else does.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return SourceLocation(error.filename, error.lineno or 1)
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)
    ]
    own = [frame for frame in frames if f"{os.sep}site-packages{os.sep}" not in frame.filename]
    if not own and not frames:
        return None
    frame = (own or frames)[-1]
    return SourceLocation(frame.filename, frame.lineno or 1, frame.name)


def _explain_missing_file(target: Target, path: str) -> LoadError:
    if os.path.isdir(path):
        return LoadError(f"{target.where!r} is a folder", hint="name a .py file in it")
    folder = os.path.dirname(path)
    files = os.listdir(folder) if os.path.isdir(folder) else []
    close = difflib.get_close_matches(os.path.basename(path), files, n=1)
    near = os.path.join(os.path.dirname(target.where), close[0]) if close else ""
    return LoadError(
        f"there is no file {target.where!r}",
        hint=f"did you mean {near}?" if near else "is the path relative to the current folder?",
    )


def _explain_missing_module(target: Target, missing: str) -> LoadError:
    parent = missing.rpartition(".")[0]
    if parent and not hasattr(sys.modules.get(parent), "__path__"):
        return LoadError(
            f"no module named {missing!r}: {parent!r} is a module, no package",
            hint=f"write {parent}:{target.name}",
        )
    path = target.where.replace(".", os.sep) + ".py"
    hint = "is it installed here, or below the current folder? or name its file: path/to/file.py:"
    return (
        LoadError(f"no module named {missing!r}", hint=f"{hint}{target.name}")
        if (not os.path.isfile(path))
        else LoadError(f"no module named {missing!r}", hint=f"write {path}:{target.name}")
    )


def _explain_failed_import(target: Target, error: BaseException) -> LoadError:
    where = find_user_line(error)
    at = f" at {where}" if where else ""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return LoadError(
            f"{target.where!r} imports {error.name!r}, which is not installed{at}",
            hint=f"install it, or put the folder of {error.name!r} on PYTHONPATH",
        )
    if isinstance(error, SystemExit):
        return LoadError(
            f"{target.where!r} exits when it is imported{at}",
            hint="put what runs as a script under: if __name__ == '__main__'",
        )
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return LoadError(
        f"{target.where!r} cannot be imported: {type(error).__name__}: {text}{at}",
        hint="see the whole traceback with --debug",
    )
