"""Torch functions and fake kernels by which a fake tensor acts as on the target device.

Most of ``torch.nn.functional`` ends in the same operators whatever device its tensors are on. A
few functions look at the backend of their arguments and choose: given a fake tensor, whose keys
say Meta, they take a path that no real tensor takes. :class:`Lowering` puts the target's path in
their place, and the operators that it calls bring their own autograd formulas along, so what is
saved for backward stays autograd's decision. Some of those operators have a fake kernel that
leaves something out; the target holds the right one, for recordings only: nothing is
registered with PyTorch, whose behaviour outside of a recording does not change.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fxmem.fakes.fake_mode import overrides_functions
from fxmem.kernels.registry import Backend, Function
from fxmem.kernels.stand_ins import note_calls
from fxmem.patching import patch

_NESTED = (
    "nn.TransformerEncoder makes nested tensors of what its padding mask leaves, whose sizes and"
    " memory depend on values: taken as padded, as enable_nested_tensor=False has them."
)


@contextlib.contextmanager
def lower_functions(target: Backend) -> Iterator[Mapping[str, None]]:
    """Replaces a target's functions within; modes entered later see a call before that.

    A mode of torch functions keeps modules of ``torch.nn`` from their fast paths in inference
    (``torch/nn/modules/activation.py``, ``transformer.py``): they ask ``torch.overrides`` whether
    anything overrides torch functions. No mode does so in the step that is analysed.

    Args:
        target: Brings the replacements.

    Yields:
        Notes on code that runs otherwise than on the target, as they come up.
    """
    is_overridden = torch.overrides.has_torch_function
    notes: dict[str, None] = {}

    def is_overridden_by_tensors(args: Iterable[Any]) -> bool:
        if sys._getframe(1).f_code is nn.TransformerEncoder.forward.__code__:
            if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in args)):
                notes[_NESTED] = None
            return is_overridden(args)
        return any(overrides_functions(type(tensor)) for tensor in args)

    checks = {torch.overrides: {"has_torch_function": is_overridden_by_tensors}}
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch(checks))
        for context in target.contexts:
            stack.enter_context(context())
        stack.enter_context(note_calls(notes))
        stack.enter_context(Lowering(target))
        yield notes


_QUERIES = frozenset(
    getattr(Tensor, name).__get__
    for name in ("requires_grad", "dtype", "shape", "grad", "is_leaf", "ndim", "itemsize", "layout")
) | {Tensor.untyped_storage, Tensor.size, Tensor.numel, Tensor.stride, Tensor.is_contiguous}
"""Questions to tensors that any device answers alike, and that wrappers ask most of all."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.open: set[Function] = set()  # functions that run


class Lowering(TorchFunctionMode):
    """Replaces torch functions while it is active, in backward too; see :func:`lower_functions`.

    While a mode handles a function that is written in Python it is not active, and what the
    function calls would not be replaced: the projections of an attention, or what a checkpoint
    recomputes in backward. So some are opened (``_OPENED``): their code runs with the mode active,
    and with the checks at its head, which would only hand it over to the mode again, answering no.

    Args:
        target: Brings the replacements.
    """

    def __init__(self, target: Backend) -> None:
        super().__init__()
        self._functions = target.functions
        self._opened: dict[Function, Function] = {f: _copy_unchecked(f) for f in _OPENED}
        self._thread = _Thread()

    def __torch_function__(
        self,
        func: Function,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _QUERIES:
            with torch._C.DisableTorchFunction():
                return func(*args, **(kwargs or {}))
        opened, is_open = self._opened.get(func), self._thread.open
        run = opened or self._functions.get(func, func)
        if run is func or any(map(overrides_functions, types)):
            return func(*args, **kwargs) if kwargs else func(*args)
        if opened is None:
            return run(*args, **(kwargs or {}))
        # It calls itself, or checks in some other way; backward within backward does not.
        if func in is_open and func is not torch.autograd.backward:
            return func(*args, **(kwargs or {}))
        is_open.add(func)
        try:
            with self:
                return opened(*args, **(kwargs or {}))
        finally:
            is_open.discard(func)


def _copy_unchecked(func: FunctionType) -> FunctionType:
    """A copy of a function, and of those it wraps, that takes nothing for overridden.

    Only torch's own: ``torch._jit_internal.boolean_dispatch`` wraps the pooling functions.
    """
    cells = []
    for cell in func.__closure__ or ():
        wrapped = cell.cell_contents
        if type(wrapped) is FunctionType and wrapped.__module__.split(".")[0] == "torch":
            cell = CellType(_copy_unchecked(wrapped))
        cells.append(cell)
    copy = FunctionType(
        func.__code__,
        _UncheckedGlobals(func.__globals__),
        func.__name__,
        func.__defaults__,
        tuple(cells) if func.__closure__ else None,
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


class _UncheckedGlobals(dict[str, Any]):
    """A function's globals, with nothing overriding torch functions."""

    def __init__(self, names: dict[str, Any]) -> None:
        super().__init__(dict.fromkeys(_CHECKS, lambda *_arguments: False))
        self["__builtins__"] = names["__builtins__"]
        self._names = names

    def __missing__(self, name: str) -> Any:
        return self._names[name]


_OPENED: tuple[Any, ...] = (
    Tensor.backward,
    torch.autograd.backward,
    torch.autograd.grad,
    nn.functional.multi_head_attention_forward,
    nn.functional.max_pool1d,
    nn.functional.max_pool1d_with_indices,
    nn.functional.dropout,
    nn.functional.batch_norm,
    nn.functional.instance_norm,
    nn.functional.group_norm,
    nn.functional.rms_norm,
    nn.functional.softmax,
    nn.functional.log_softmax,
    nn.functional.ctc_loss,
)
"""Python functions of torch that call functions which a target replaces."""

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
