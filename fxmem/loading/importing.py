"""The module that a TARGET names, imported, and the name in it, found."""

from __future__ import annotations

import argparse
import builtins
import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fxmem.errors import LoadError, summarize_error
from fxmem.loading.parsing import Target
from fxmem.tracing.source import find_raising_source, find_source

_MOST_NAMES = 8
_DEBUG = "see the whole traceback with --debug"
_MAIN = "put what runs as a script under: if __name__ == '__main__'"
_BACKWARDS = frozenset({torch.Tensor.backward, torch.autograd.backward})


@contextlib.contextmanager
def keep_importable(target: Target) -> Iterator[None]:
    """Has the folder of a target's file importable within, as ``python file.py`` has.

    The current folder is put on ``sys.path`` for good, as by ``python -m``.
    """
    cwd = os.getcwd()
    if "" not in sys.path and cwd not in sys.path:
        sys.path.insert(0, cwd)
    folder = _find_package(_find_path(target))[0] if target.is_file else cwd
    added = [] if folder in sys.path else [folder]
    sys.path[:0] = added
    try:
        yield
    finally:
        for entry in added:
            with contextlib.suppress(ValueError):
                sys.path.remove(entry)


def import_target(target: Target, *, again: bool = True) -> ModuleType:
    """The target's module; call it within :func:`keep_importable`.

    Args:
        target: The target.
        again: Whether a file that has been imported is read again; a module never is.

    Raises:
        LoadError: There is none, or it cannot be imported.
    """
    with _refuse_scripts(target):
        return _import_file(target, again) if target.is_file else _import_module(target)


def _find_path(target: Target) -> str:
    return os.path.abspath(os.path.expanduser(target.where))


def _import_module(target: Target) -> ModuleType:
    importlib.invalidate_caches()
    try:
        return importlib.import_module(target.where)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if target.where == missing or target.where.startswith(missing + "."):
            raise _explain_missing_module(target, missing) from error
        raise _explain_failed_import(target, error) from error
    except LoadError:
        raise
    except (Exception, SystemExit) as error:
        raise _explain_failed_import(target, error) from error


def _import_file(target: Target, again: bool) -> ModuleType:
    path = _find_path(target)
    if not os.path.isfile(path):
        raise _explain_missing_file(target, path)
    name = _find_package(path)[1]
    known = sys.modules.get(name)
    if known is not None and known.__file__ == path and not again:
        return known
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


@contextlib.contextmanager
def _refuse_scripts(target: Target) -> Iterator[None]:
    """Stops a module that, when it is imported, does what only a script should do.

    It would wait for an answer, exit for want of arguments, or train for hours.
    """

    def refuse(does: str) -> NoReturn:
        where = find_source()
        at = f" at {where}" if where else ""
        raise LoadError(f"{target.where!r} {does} when it is imported{at}", hint=_MAIN)

    def refuse_arguments(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        refuse(f"reads the command line ({message})")

    original_error, original_input = argparse.ArgumentParser.error, builtins.input
    argparse.ArgumentParser.error = refuse_arguments  # type: ignore[assignment,method-assign]
    builtins.input = lambda prompt="": refuse("asks for input")
    try:
        with _RefuseTraining(refuse):
            yield
    finally:
        argparse.ArgumentParser.error = original_error  # type: ignore[method-assign]
        builtins.input = original_input


class _RefuseTraining(TorchFunctionMode):
    def __init__(self, refuse: Callable[[str], NoReturn]) -> None:
        super().__init__()
        self._refuse = refuse

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _BACKWARDS:
            self._refuse("trains")
        return func(*args, **(kwargs or {}))


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


def find_object(module: ModuleType, target: Target, *, is_model: bool = True) -> Any:
    """What the target's dotted name means in the module.

    Args:
        module: The target's module.
        target: The target.
        is_model: Whether a model is looked for, else a function.

    Raises:
        LoadError: There is no such name; offers those that are close, and what is there.
    """
    found: Any = module
    path = target.where
    for part in target.name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise LoadError(
                f"no {part!r} in {path!r}", hint=_suggest_names(found, part, is_model)
            ) from None
        except Exception as error:  # a module that imports on access
            raise _explain_failed_import(target, error) from error
        path = f"{path}.{part}" if ":" in path else f"{path}:{part}"
    return found


def _suggest_names(owner: object, name: str, is_model: bool) -> str:
    public = [entry for entry in dir(owner) if not entry.startswith("_")]
    close = difflib.get_close_matches(name, public, n=3)
    if close:
        return f"did you mean {' or '.join(close)}?"
    names = [
        entry
        for entry, value in sorted(vars(owner).items() if hasattr(owner, "__dict__") else [])
        if (_is_model(value) if is_model else inspect.isfunction(value))
    ]
    if not names:
        return f"there is no {'nn.Module' if is_model else 'function'} in it"
    more = ", ..." if len(names) > _MOST_NAMES else ""
    return f"{'models' if is_model else 'functions'} there: {', '.join(names[:_MOST_NAMES])}{more}"


def _is_model(value: object) -> bool:
    if inspect.isclass(value):
        return issubclass(value, nn.Module) and value is not nn.Module
    return isinstance(value, nn.Module)


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


def explain_missing_package(name: str, importer: str) -> LoadError:
    """The error for a package that code imports and that is not there.

    Args:
        name: The package or module.
        importer: The line or the file that imports it.
    """
    return LoadError(
        f"{importer} imports {name!r}, which is not installed",
        hint=f"pip install {name.partition('.')[0]}, or put its folder on PYTHONPATH",
    )


def _explain_failed_import(target: Target, error: BaseException) -> LoadError:
    where = find_raising_source(error)
    at = f" at {where}" if where else ""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return explain_missing_package(error.name, str(where or repr(target.where)))
    if isinstance(error, SystemExit):
        return LoadError(f"{target.where!r} exits when it is imported{at}", hint=_MAIN)
    if isinstance(error, ImportError) and "relative import" in str(error):
        return LoadError(
            f"{target.where!r} imports from a package that it is not in{at}: {error}",
            hint=f"put an __init__.py beside it, or name it package.module:{target.name}",
        )
    # A syntax error's text repeats its place.
    text = f"SyntaxError: {error.msg}" if isinstance(error, SyntaxError) else summarize_error(error)
    hint = _DEBUG
    if "operator torchvision::" in text:
        hint = "torch and torchvision do not fit together: install both anew, from one index"
    elif isinstance(error, _OF_SCRIPTS) and where and where.function == "<module>":
        hint = f"{_DEBUG}; {_MAIN}"
    return LoadError(f"{target.where!r} cannot be imported: {text}{at}", hint=hint)


_OF_SCRIPTS = (OSError, RuntimeError, LookupError, ValueError)
"""What a script raises for want of data, arguments or a device."""
