"""Getting to the answer sooner, in a process that is ours.

``FakeTensorMode`` reads two flags of ``torch._dynamo.config`` and makes a ``ConstantSource``, and
for that Python imports all of ``torch._dynamo``, the tracer of torch.compile: about a second, a
third of the command's time, and nothing of it is used. :func:`defer_torch_compile` puts a stand-in
in its place that has what is asked for, and imports the real package at the first use of anything
else, for instance by a model that compiles a part of itself. Only the command line does this: a
library has no business with its caller's modules.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = "torch._dynamo"
_CONFIG = "torch._dynamo.config"
_SOURCE = "torch._dynamo.source"


class _ConstantSource:
    """Names a tensor that was met on the way; only symbolic sizes, which nobody makes, look."""

    def __init__(self, source_name: str) -> None:
        self.source_name = source_name


class _RandomValueSource:
    """What no tensor of an analysis comes from; ``FakeTensorConverter`` asks."""


class _StandIn(ModuleType):
    """Hands over to the real package at the first attribute that it lacks."""

    def __getattr__(self, name: str) -> Any:
        # The import system looks for many; the path is asked for to import a submodule.
        if name.startswith("__") and (name != "__path__" or self.__name__ != _PACKAGE):
            raise AttributeError(name)
        _import_package()
        return getattr(importlib.import_module(self.__name__), name)


@contextlib.contextmanager
def defer_torch_compile() -> Iterator[None]:
    """Has the stand-in in place, unless the package is there already or is not as expected."""
    import torch

    config = None if _PACKAGE in sys.modules else _import_config(Path(torch.__file__).parent)
    if config is None:
        yield
        return
    package, source = _StandIn(_PACKAGE), _StandIn(_SOURCE)
    package.config, package.disable = config, _disable  # type: ignore[attr-defined]
    source.ConstantSource = _ConstantSource  # type: ignore[attr-defined]
    source.RandomValueSource = _RandomValueSource  # type: ignore[attr-defined]
    sys.modules |= {_PACKAGE: package, _SOURCE: source}
    torch._dynamo = package
    try:
        yield
    finally:
        if sys.modules.get(_PACKAGE) is package:
            for name in (_PACKAGE, _SOURCE, _CONFIG):
                del sys.modules[name]
            del torch._dynamo  # torch imports it when it is asked for


def _import_config(folder: Path) -> ModuleType | None:
    """``torch._dynamo.config`` without the package around it."""
    path = folder / "_dynamo" / "config.py"
    spec = importlib.util.spec_from_file_location(_CONFIG, path)
    if spec is None or spec.loader is None:
        return None
    config = importlib.util.module_from_spec(spec)
    sys.modules[_CONFIG] = config  # the module installs itself under its name
    try:
        spec.loader.exec_module(config)
    except Exception:
        del sys.modules[_CONFIG]
        return None
    return config


def _disable(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Callable[..., Any]:
    """``torch._dynamo.disable`` where nothing is compiled; with options alone a decorator."""
    return _disable if function is None else function


def _import_package() -> ModuleType:
    import torch

    if isinstance(sys.modules.get(_PACKAGE), _StandIn):
        config = sys.modules[_CONFIG]
        for name in (_PACKAGE, _SOURCE):
            del sys.modules[name]
        package = importlib.import_module(_PACKAGE)
        # The import system sets these only for what it imported itself.
        torch._dynamo = package
        package.config = config  # type: ignore[attr-defined]
    return sys.modules[_PACKAGE]
