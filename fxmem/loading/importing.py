"""The module that a TARGET names, imported, and the name in it, found."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import nn

from fxmem.errors import LoadError, suggest_names, summarize_error
from fxmem.kernels.stand_ins import (
    MissingNameError,
    StandIn,
    find_stand_in,
    is_stood_for,
    offer_stand_ins,
)
from fxmem.loading.parsing import Target
from fxmem.patching import patch
from fxmem.source import find_raising_source, find_source

_MOST_NAMES = 8
_DEBUG = "see the whole traceback with --debug"
_MAIN = "put what runs as a script under: if __name__ == '__main__'"


@contextlib.contextmanager
def keep_importable(target: Target) -> Iterator[None]:
    """Makes the folder of a target's file importable within, as ``python file.py`` does.

    The current folder is put on ``sys.path`` for good, as by ``python -m``. What stands for
    packages that are not installed is found, too.
    """
    cwd = os.getcwd()
    if "" not in sys.path and cwd not in sys.path:
        sys.path.insert(0, cwd)
    folder = _find_package(target)[0] if target.is_file else cwd
    added = [] if folder in sys.path else [folder]
    sys.path[:0] = added
    try:
        with offer_stand_ins():
            yield
    finally:
        for entry in added:
            with contextlib.suppress(ValueError):
                sys.path.remove(entry)


@contextlib.contextmanager
def read_files_once() -> Iterator[None]:
    """Reads the file of a TARGET once, however often it is imported: some can be read but once.

    Such a file defines operators, or registers classes by name.
    """
    read = _read.get()
    token = _read.set(set() if read is None else read)
    try:
        yield
    finally:
        _read.reset(token)


_read: ContextVar[set[str] | None] = ContextVar("read", default=None)


def import_target(target: Target, *, again: bool = True) -> ModuleType:
    """Imports the target's module; call it within :func:`keep_importable`.

    With ``again``, a file that has been imported is read again, but for
    :func:`read_files_once`; a module never is.

    Raises:
        LoadError: There is none, or it cannot be imported.
    """
    name, path = target.where, os.path.abspath(os.path.expanduser(target.where))
    if target.is_file:
        if not os.path.isfile(path):
            raise _explain_missing_file(target, path)
        name = _find_package(target)[1]
        known, read = sys.modules.get(name), _read.get()
        again = again and path not in (read or ())
        if known is not None and known.__file__ == path and not again:
            return known
        if read is not None:
            read.add(path)
    importlib.invalidate_caches()
    try:
        with _refuse_training(target):
            if not target.is_file or "." in name:  # in a package, siblings are relative to it
                return importlib.import_module(name)
            return _run_file(name, path)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if target.is_file or not (name == missing or name.startswith(missing + ".")):
            raise _explain_failed_import(target, error) from error
        raise LoadError(
            f"no module named {missing!r}",
            hint="is it installed here, or below the current folder? or name its file: "
            f"path/to/file.py:{target.name}",
        ) from error
    except LoadError:
        raise
    except (Exception, SystemExit) as error:
        raise _explain_failed_import(target, error) from error


def _run_file(name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LoadError(f"{path!r} is not a Python file", hint="name a .py file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextlib.contextmanager
def _refuse_training(target: Target) -> Iterator[None]:
    """Stops a script that would train for hours when it is imported."""

    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        where = find_source()
        at = f" at {where}" if where else ""
        raise LoadError(f"{target.where!r} trains when it is imported{at}", hint=_MAIN)

    with patch({torch.autograd: {"backward": refuse}}):
        yield


def _find_package(target: Target) -> tuple[str, str]:
    """Finds the folder to import a file from, and the name of its module there."""
    path = os.path.abspath(os.path.expanduser(target.where))
    folder, filename = os.path.split(path)
    stem = filename.removesuffix(".py")
    root, parts = folder, [] if stem == "__init__" else [stem]
    while os.path.isfile(os.path.join(root, "__init__.py")) and len(parts) < 32:
        root, package = os.path.split(root)
        parts.insert(0, package)
    if root != folder and all(part.isidentifier() for part in parts):
        file = getattr(sys.modules.get(parts[0]), "__file__", None) or ""
        own = os.path.realpath(os.path.join(root, parts[0])) + os.sep
        if parts[0] not in sys.modules or os.path.realpath(file).startswith(own):
            return root, ".".join(parts)
    known = sys.modules.get(stem)
    is_free = known is None and stem not in sys.stdlib_module_names
    if not (is_free or getattr(known, "__file__", None) == path):
        stem = f"{stem}_{hashlib.sha256(path.encode()).hexdigest()[:8]}"
    return root, stem


def find_object(module: ModuleType, target: Target, *, is_model: bool = True) -> Any:
    """Finds the model, or the function, that the target's dotted name means in the module.

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
    if close := suggest_names(name, public, most=3):
        return close

    def is_meant(value: object) -> bool:
        if not is_model:
            return inspect.isfunction(value)
        is_class = inspect.isclass(value) and issubclass(value, nn.Module)
        return isinstance(value, nn.Module) or (is_class and value is not nn.Module)

    kind = "models" if is_model else "functions"
    own = getattr(owner, "__dict__", {})  # a lazy module imports what getattr asks for
    names = [entry for entry in public if is_meant(own.get(entry))]
    more = ", ..." if len(names) > _MOST_NAMES else ""
    return f"{kind} there: {', '.join(names[:_MOST_NAMES]) or 'none'}{more}"


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


_TORCH = "the modules and optimizers of torch.nn and torch.optim"
_SHARD = "torch.distributed.fsdp.fully_shard"
_INSTEAD = {
    **dict.fromkeys(("apex", "transformer_engine"), _TORCH),
    "flash_attn_interface": 'attn_implementation="flash_attention_2"',
    "sageattention": "scaled_dot_product_attention",
    "deepspeed": _SHARD,
    "megatron": _SHARD,
}
"""Packages whose CUDA code fxmem does not know, and what runs on fake tensors instead."""

_PYTHON_ONLY = {
    "flash_attn": "FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE FLASH_ATTENTION_FORCE_BUILD=TRUE",
    "mamba_ssm": "MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE",
    "causal_conv1d": "CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE CAUSAL_CONV1D_FORCE_BUILD=TRUE",
    "xformers": "",
    "bitsandbytes": "",
}
"""Packages that run with their Python alone, and the variables for ``pip`` to build no more."""

_PROJECTS = {
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "cv2": "opencv-python-headless",
    "PIL": "pillow",
    "yaml": "pyyaml",
}
"""Packages that training scripts import, and what ``pip`` calls them."""

_COMPILED = re.compile(r"(?i)_cuda|cuda_|_ext$|\b_c$")
"""Names that compiled modules of packages have."""

_TOLD = (ImportError, importlib.metadata.PackageNotFoundError)
"""Errors whose text tells what is missing."""


def find_missing_package(error: BaseException) -> str:
    """Finds the package for want of which an import failed; empty for none.

    Libraries raise an error of their own for some, as transformers for deepspeed.
    """
    if type(error) is ModuleNotFoundError:
        return error.name or ""
    if isinstance(error, MissingNameError):
        return error.path
    if type(error) is ImportError and is_stood_for(error.name or ""):
        return f"{error.name}.{str(error).split(chr(39))[1]}"  # cannot import name 'x' from ...
    words: list[str] = re.findall(r"\w+", str(error).replace("-", "_"))
    words = words if type(error) in _TOLD else []
    known = _INSTEAD.keys() | _PYTHON_ONLY.keys()
    for name in words:
        if name in known and importlib.util.find_spec(name) is None and not is_stood_for(name):
            return name
    return ""


def explain_missing_package(name: str, importer: str) -> LoadError:
    """Makes the error for a package that code imports, at a line or in a file, and is not there."""
    package = name.partition(".")[0]
    stand_in = find_stand_in(package)
    if stand_in is not None and is_stood_for(package):
        return explain_missing_name(stand_in, name, importer)
    if package != name and importlib.util.find_spec(package) is not None:
        return LoadError(
            f"{importer} imports {name!r}, which the installed {package} does not have",
            hint=f"it needs another release of {package}",
        )
    if package in _INSTEAD:
        return LoadError(
            f"{importer} needs {package}, which is not installed, and whose kernels fxmem does not"
            " know",
            hint=f"instead: {_INSTEAD[package]}; or tell them: fxmem.register_stand_in",
        )
    if package in _PYTHON_ONLY:
        return LoadError(
            f"{importer} needs {package}, which is not installed",
            hint=f"its Python is enough: {_write_install(package)}",
        )
    if _COMPILED.search(name):
        return LoadError(
            f"{importer} imports {name!r}, a compiled module that is not installed",
            hint=f"say what its functions make: fxmem.register_stand_in({name!r}, ...)",
        )
    return LoadError(
        f"{importer} imports {name!r}, which is not installed",
        hint=f"pip install {_PROJECTS.get(package, package)}, or put its folder on PYTHONPATH",
    )


def explain_missing_name(stand_in: StandIn, name: str, importer: str) -> LoadError:
    """Makes the error for a name that the stand-in for a package lacks."""
    package = stand_in.package
    is_known = package in _PYTHON_ONLY
    install = f"install its Python: {_write_install(package)}; or " if is_known else ""
    return LoadError(
        f"{importer} needs {name}, which fxmem's stand-in for {stand_in.title} does not have",
        hint=f"{install}fxmem.register_stand_in",
    )


def _write_install(package: str) -> str:
    command = f"pip install --no-deps --no-build-isolation {package.replace('_', '-')}"
    return f"{_PYTHON_ONLY[package]} {command}".strip()


def _explain_failed_import(target: Target, error: BaseException) -> LoadError:
    where = find_raising_source(error)
    at = f" at {where}" if where else ""
    if name := find_missing_package(error):
        return explain_missing_package(name, str(where or repr(target.where)))
    if isinstance(error, SystemExit):
        return LoadError(f"{target.where!r} exits when it is imported{at}", hint=_MAIN)
    # A syntax error's text repeats its place.
    text = f"SyntaxError: {error.msg}" if isinstance(error, SyntaxError) else summarize_error(error)
    hint = _DEBUG
    if "operator torchvision::" in text:
        hint = "torch and torchvision do not fit together: reinstall both from one index"
    elif "relative import" in text:
        hint = f"put an __init__.py beside it, or name it package.module:{target.name}"
    elif isinstance(error, OSError | RuntimeError) and where and where.function == "<module>":
        hint = f"{_DEBUG}; {_MAIN}"  # a script, for want of data or a device
    return LoadError(f"{target.where!r} cannot be imported: {text}{at}", hint=hint)
