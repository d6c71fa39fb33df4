"""Code under ``torch.compile``, which runs as it is written."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from fxmem.patching import leave_recording, patch
from fxmem.units import format_bytes

NOT_COMPILED = "torch.compile was left out: the figures are of eager mode."
COMPILED = "torch.compile: "
"""The beginning of the note that says what was compiled."""
_DYNAMO = "torch._dynamo"
_WRAPPED = "_orig_mod"
"""Name of the module in ``torch._dynamo.eval_frame.OptimizedModule``."""


def read_compile(notes: Iterable[str]) -> str | None:
    """Reads in the notes of a recording what came of ``torch.compile``; None where none was called.

    >>> read_compile([NOT_COMPILED])
    'left out'
    """
    notes = [*notes]
    if NOT_COMPILED in notes:
        return "left out"
    return "compiled" if any(note.startswith(COMPILED) for note in notes) else None


def is_compiled(model: nn.Module) -> bool:
    """Returns whether a module or one within has been given to ``torch.compile``."""
    return any(
        _WRAPPED in module._modules or module._compiled_call_impl is not None
        for module in model.modules()
    )


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """Finds the module that ``torch.compile`` has wrapped; returns another itself."""
    return module._modules.get(_WRAPPED) or module


def read_fqn(fqn: str) -> str:
    """Reads the name of a module or a tensor without the wrappers of ``torch.compile``.

    >>> read_fqn("_orig_mod.layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in fqn.split(".") if part != _WRAPPED)


@contextlib.contextmanager
def leave_out_compiler(notes: MutableMapping[str, None]) -> Iterator[None]:
    """Runs compiled functions and modules eagerly, also those compiled before, and notes that.

    Within, ``torch.compile`` returns what it is given: importing ``torch._dynamo`` takes seconds.
    """

    def compile_nothing(model: Any = None, *_args: Any, **options: Any) -> Any:
        if not options.get("disable"):
            notes[NOT_COMPILED] = None
        return model if model is not None else lambda function: function

    def note_and_force_eager(package: Any) -> contextlib.AbstractContextManager[Any]:
        find_callback = package.eval_frame._callback_from_stance

        def find_no_callback(callback: Any) -> Any:
            if callback:
                notes[NOT_COMPILED] = None
            return find_callback(callback)

        return force_eager(package, _callback_from_stance=find_no_callback)

    with (
        patch({torch: {"compile": compile_nothing}, nn.Module: {"compile": compile_nothing}}),
        patch_when_imported(_DYNAMO, note_and_force_eager),
    ):
        yield


def force_eager(package: Any, **replaced: Any) -> contextlib.AbstractContextManager[Any]:
    """Runs compiled functions eagerly, within; ``package`` is ``torch._dynamo``.

    ``torch.compiler.set_stance`` would refuse to in a hook of a compiled optimizer.
    """
    module = package.eval_frame
    return patch({module: {"_stance": module.DynamoStance("force_eager"), **replaced}})


def compare_peaks(eager_bytes: int, compiled_bytes: int) -> str:
    """Compares the peaks of a step in eager mode and compiled, in a note.

    >>> compare_peaks(18 << 30, 12 << 30)
    "Eager mode's peak is 18.00 GiB, that of compiled code 12.00 GiB."
    """
    eager, compiled = format_bytes(eager_bytes), format_bytes(compiled_bytes)
    return f"Eager mode's peak is {eager}, that of compiled code {compiled}."


@contextlib.contextmanager
def patch_when_imported(
    name: str, make_patch: Callable[[ModuleType], contextlib.AbstractContextManager[Any]]
) -> Iterator[None]:
    """Patches a module that takes long to import, within: at once, or when others import it."""
    is_asking = False
    with contextlib.ExitStack() as stack:

        def find_spec(asked: str, *_place: Any) -> ModuleSpec | None:
            nonlocal is_asking
            if asked != name or is_asking:
                return None
            is_asking = True  # others find the module, also where one only asks whether it is there
            try:
                spec = importlib.util.find_spec(name)
            finally:
                is_asking = False
            if spec is None:  # not installed
                return None
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with leave_recording():  # what others import lasts
                    run(module)
                stack.enter_context(make_patch(module))

            loader.exec_module = exec_module
            return spec

        finder: Any = SimpleNamespace(find_spec=find_spec)
        if name in sys.modules:
            stack.enter_context(make_patch(sys.modules[name]))
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)
