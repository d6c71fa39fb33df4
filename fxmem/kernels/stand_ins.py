"""Modules that stand for those that cannot be imported without a GPU.

They are compiled extensions, whose functions are replaced where a machine has them too, and
packages that are not installed. A stand-in is found after all that is installed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from fxmem.errors import TraceError
from fxmem.patching import patch
from fxmem.source import find_source
from fxmem.tracing.compiled import patch_when_imported


@dataclass(frozen=True)
class StandIn:
    """A module that stands for another.

    Attributes:
        module: The other's name.
        names: What code may import from the module.
        version: Release of the package that a module of Python stands for; None for a compiled
            module.
    """

    module: str
    names: dict[str, Any]
    version: str | None

    @property
    def package(self) -> str:
        """The package that the module is in."""
        return self.module.partition(".")[0]

    @property
    def title(self) -> str:
        """The package and its release, or the compiled module."""
        return self.module if self.version is None else f"{self.package} {self.version}"


_registered: dict[str, StandIn] = {}
_notes: list[MutableMapping[str, None]] = []
"""The notes of the recordings that run, the innermost last."""


def register_stand_in(module: str, names: Mapping[str, Any], *, version: str | None = None) -> None:
    """Registers what stands for a module that cannot be imported on a machine without a GPU.

    The functions take what those of the module take, and make the tensors that those make: on
    the GPU's fake tensors, with ``torch.empty``. Within recordings, and in what the command line
    loads, an import of the module finds them, where the module is not installed. A note in the
    result names the packages that were stood for.

    Args:
        module: As code imports it: ``"acme_cuda"``, ``"acme.ops"``. Packages around it are made.
        names: Functions, classes and the like, by the name that code imports.
        version: The release of the package that they are like. None for a compiled module: where
            that is installed, its functions are replaced within recordings.
    """
    package = module.partition(".")[0]
    if version is not None:
        names = {name: _tell_calls(value, package) for name, value in names.items()}
    _registered[module] = StandIn(module, {**names}, version)
    parent = module.rpartition(".")[0]
    if parent and parent not in _registered:
        register_stand_in(parent, {}, version=version)


def _tell_calls(function: Any, package: str) -> Any:
    if not isinstance(function, FunctionType):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        title = _registered[package].title
        tell(f"{package} is not installed: fxmem's stand-in for {title} ran.")
        return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def offer_stand_ins() -> Iterator[None]:
    """Lets code import what is stood for, within; afterwards none of it is in ``sys.modules``."""
    if _FINDER in sys.meta_path:
        yield
        return
    sys.meta_path.append(_FINDER)
    try:
        yield
    finally:
        sys.meta_path.remove(_FINDER)
        for name in [name for name, module in sys.modules.items() if _is_stand_in(module)]:
            del sys.modules[name]


@contextlib.contextmanager
def replace_extensions() -> Iterator[None]:
    """Replaces the functions of compiled modules within, those imported before among them."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(offer_stand_ins())
        stack.enter_context(patch_when_imported("torch.utils.cpp_extension", _compile_nothing))
        for stand_in in _registered.values():
            if stand_in.version is None:
                stack.enter_context(patch_when_imported(stand_in.module, _replace_functions))
        yield


def _replace_functions(module: ModuleType) -> contextlib.AbstractContextManager[None]:
    return patch({} if _is_stand_in(module) else {module: _registered[module.__name__].names})


def _compile_nothing(cpp_extension: Any) -> contextlib.AbstractContextManager[None]:
    """Gives the stand-in for an extension that code would compile for CUDA, or refuses."""

    def find_or_compile(compile_: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if name in _registered:
            return importlib.import_module(name)
        sources = (*args, kwargs.get("sources"), kwargs.get("cuda_sources"))
        has_cuda = kwargs.get("with_cuda") or kwargs.get("cuda_sources")
        if not has_cuda and ".cu'" not in repr(sources):
            return compile_(name, *args, **kwargs)
        source = find_source()
        raise TraceError(
            f"{source or 'the code'} compiles the CUDA extension {name!r}, which cannot run here",
            hint=f"say what its functions make: fxmem.register_stand_in({name!r}, ...)",
        )

    names = ("load", "load_inline")
    return patch(
        {cpp_extension: {n: partial(find_or_compile, getattr(cpp_extension, n)) for n in names}}
    )


def find_stand_in(name: str) -> StandIn | None:
    """Finds what stands for a module, or for the package that it is in."""
    return _registered.get(name) or _registered.get(name.partition(".")[0])


def tell(note: str, *, instead_of: str = "") -> None:
    """Notes a sentence in the recording that runs, if one does."""
    if _notes:
        _notes[-1].pop(instead_of, None)
        _notes[-1][note] = None


@contextlib.contextmanager
def note_calls(notes: MutableMapping[str, None]) -> Iterator[None]:
    """Notes which packages are stood for, of those that code calls within."""
    _notes.append(notes)
    try:
        yield
    finally:
        _notes.pop()


class MissingNameError(AttributeError):
    """A stand-in lacks a name that code takes from the module.

    Attributes:
        path: The name, with its module's.
    """

    def __init__(self, path: str, stand_in: StandIn) -> None:
        super().__init__(f"fxmem's stand-in for {stand_in.title} has no {path}")
        self.path = path


class _Module(ModuleType):
    """A stand-in, which tells what it lacks."""

    def __getattr__(self, name: str) -> Any:
        stand_in = _registered[self.__name__]
        if name == "__version__" and stand_in.version:
            return stand_in.version
        if name in stand_in.names:
            return stand_in.names[name]
        if name.startswith("__"):  # as importlib asks for
            raise AttributeError(name)
        raise MissingNameError(f"{self.__name__}.{name}", stand_in)


def _is_stand_in(module: object) -> bool:
    return isinstance(module, _Module)


def is_stood_for(name: str) -> bool:
    """Returns whether a module is not installed, and has a stand-in."""
    if name.partition(".")[0] not in _registered:
        return False
    spec = importlib.util.find_spec(name.partition(".")[0])
    return spec is None or isinstance(spec.loader, _Loader)


class _Loader(Loader):
    """Makes a stand-in: one for each import, as :func:`patch_when_imported` changes it."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Finder(DistributionFinder):
    """Finds stand-ins for modules, and the metadata of the packages that these are of."""

    def find_spec(self, fullname: str, _path: Any, _target: Any = None) -> ModuleSpec | None:
        parent = fullname.rpartition(".")[0]
        if fullname not in _registered or (parent and not _is_stand_in(sys.modules.get(parent))):
            return None
        return ModuleSpec(fullname, _Loader(), origin="fxmem", is_package=True)

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        asked = getattr(context, "name", None)
        for name, stand_in in _registered.items():
            is_asked = asked is None or asked.lower().replace("-", "_") == name
            if stand_in.version and stand_in.package == name and is_asked:
                yield _Distribution(stand_in)


class _Distribution(Distribution):
    """Metadata of a package that is stood for."""

    def __init__(self, stand_in: StandIn) -> None:
        self._stand_in = stand_in

    def read_text(self, filename: str) -> str | None:
        name = self._stand_in.module
        if filename == "top_level.txt":
            return name
        if filename == "METADATA":
            return f"Metadata-Version: 2.1\nName: {name}\nVersion: {self._stand_in.version}\n"
        return None

    def locate_file(self, path: Any) -> Any:
        return Path(path)


_FINDER = _Finder()
