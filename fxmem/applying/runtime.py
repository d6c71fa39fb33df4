"""Functions that planned code calls: segments that backward recomputes, and in-place forms.

Segments are activation checkpoints and behave as under
``torch.utils.checkpoint(use_reentrant=False)``, at a fraction of its cost
(``benchmarks/overhead.py``). In the first run, hooks give autograd an empty slot in the place of
each tensor that it saves. When backward asks for the first one, the segment runs again, stops once
as many tensors were saved as in the first run, and so fills the slots that are still there. A slot
gives its tensor away once: memory is freed as backward proceeds. Beyond PyTorch's: batch statistics
are counted once, random states are kept only where the segment draws, and parameters that change
between the two runs are an error rather than wrong gradients.

Source: ``torch/utils/checkpoint.py``, ``_CheckpointFrame`` and its hooks.

A plan of inference is applied to calls with the dtypes that it was made for, and its guard sees to
hooks that came later. Where the result would be larger than the value, or with gradients, the plain
form runs.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _autograd, _is_any_autocast_enabled
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from fxmem.errors import FxmemWarning, UsageError
from fxmem.tracing import tracer
from fxmem.tracing.state import list_generators, read_autocast, read_state, set_state
from fxmem.versions.fallbacks import save_tensor

_alone = threading.RLock()  # backward has a thread for each device, and this borrows buffers
_OURS = ("torch", "fxmem")
_GENERATED = "<eval_with_key>"
"""The file name of code that torch.fx generates."""
NO_TRANSFORMS = "torch.func's transforms do not allow checkpoints: this step runs without the plan"


def checkpoint(
    segment: Callable[..., Any],
    *inputs: Any,
    norms: Sequence[nn.Module] = (),
    states: Sequence[tuple[nn.Module, str]] = (),
    name: str = "",
    draws: bool = True,
    whole: bool = False,
) -> Any:
    """Runs a segment without saving what its backward needs, which runs the segment again.

    Args:
        segment: The code of the segment.
        inputs: Its arguments, held until its backward is over.
        norms: Its batch normalisations, whose statistics the second run must not update.
        states: Other tensors that it updates, by module and attribute; the second run leaves them.
        name: Name of the segment in errors; that of its function by default.
        draws: Whether it may draw random numbers.
        whole: Whether nothing comes after its last save: to return is quicker than to stop.

    Raises:
        UsageError: In backward, where the second run would not compute what the first one did.
    """
    if torch.compiler.is_compiling():
        return _run_uncompiled(segment, *inputs, norms=norms, states=states, name=name)
    if not torch.is_grad_enabled():
        return segment(*inputs)
    has_hooks = _autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    if not has_hooks or peek_interpreter_stack() is not None:
        warn_caller(NO_TRANSFORMS)
        return segment(*inputs)
    held = [(m, key, getattr(m, key).detach().clone()) for m, key in states]
    record = _Record(name or getattr(segment, "__name__", "a segment"), whole)
    return tracer.run_segment(_Frame(segment, norms, held, draws, record).run, *inputs)


_run_uncompiled = torch.compiler.disable(checkpoint)  # type: ignore[no-untyped-call]


class _Slot:
    __slots__ = ("__weakref__", "tensor")
    tensor: Tensor | None


class _Stop(Exception):
    """Raised where all that the first run saved is there again."""


class _Record:
    """The tensors that a segment saves, described alone: modules may keep autograd graphs alive."""

    def __init__(self, name: str, whole: bool) -> None:
        self.name, self.whole, self.refilled = name, whole, 0
        self.inputs: Sequence[int] = ()
        self.slots: list[tuple[weakref.ref[_Slot], tuple[Any, ...]]] = []

    def pack(self, tensor: Tensor) -> _Slot:
        slot = _Slot()
        slot.tensor = None
        self.slots.append((weakref.ref(slot), self.describe(tensor)))
        return slot

    def refill(self, tensor: Tensor) -> Tensor:
        if self.refilled == len(self.slots):
            raise self.refuse("it saves more tensors than before")
        reference, then = self.slots[self.refilled]
        now = self.describe(tensor)
        if then != now:
            reason = f"its parameter of {now[:2]} was modified or replaced since forward"
            if then[:2] != now[:2]:
                reason = f"it saves {now[:2]} in the place of {then[:2]}"
            elif then[2] != now[2]:
                reason = "parameters were frozen or unfrozen since forward"
            raise self.refuse(reason)
        self.refilled += 1
        tensor = tensor.detach() if now[2] else tensor
        if (slot := reference()) is not None:
            slot.tensor = tensor
        if self.refilled == len(self.slots) and not self.whole:
            raise _Stop
        return tensor

    def describe(self, tensor: Tensor) -> tuple[Any, ...]:
        """Describes what both runs must agree on: of a parameter, also its identity and version."""
        if not tensor.requires_grad:
            return tensor.shape, tensor.dtype, False
        base: Any = tensor._base if tensor._is_view() else tensor
        if base.is_leaf and isinstance(base, nn.Parameter) and id(base) not in self.inputs:
            return tensor.shape, tensor.dtype, True, id(base), base._version
        return tensor.shape, tensor.dtype, True

    def refuse(self, reason: str) -> UsageError:
        message = f"{self.name} of the plan cannot be recomputed in backward: {reason}"
        return UsageError(message, hint="change parameters, mode and attributes after backward")


@dataclass(eq=False)
class _Frame:
    """One run of a segment, and all that it takes to repeat the run."""

    segment: Callable[..., Any]
    norms: Sequence[nn.Module]
    states: Sequence[tuple[nn.Module, str, Tensor]]
    draws: bool
    record: _Record

    def run(self, *inputs: Any) -> Any:
        # One that is given twice stays one object, as nn.MultiheadAttention wants.
        kept = {id(value): _keep(value) for value in inputs}
        self.inputs = [kept[id(value)] for value in inputs]
        bases = [id(v._base) for v in inputs if isinstance(v, Tensor)]  # no views in the second run
        self.record.inputs = (*kept, *bases)
        self.autocast = read_autocast()
        generators = list_generators(inputs) if self.draws else ()
        self.drawn = [(generator, read_state(generator)) for generator in generators]
        with saved_tensors_hooks(self.record.pack, self.unpack):
            result = self.segment(*inputs)
        self.drawn = [(g, state) for g, state in self.drawn if read_state(g) != state]
        return result

    def unpack(self, slot: _Slot) -> Any:
        if slot.tensor is None:
            with _alone:
                self.recompute()
        tensor, slot.tensor = slot.tensor, None
        return tensor

    def recompute(self) -> None:
        record = self.record
        try:
            kept = {restore: restore() for restore in self.inputs}
        except RuntimeError as error:
            told = record.refuse("its input was modified in place since forward")
            raise told if "inplace operation" in str(error) else error from None
        record.refilled = 0
        with contextlib.ExitStack() as stack:
            self.restore(stack)  # what the first run met
            try:
                with torch.enable_grad(), saved_tensors_hooks(record.refill, lambda t: t):
                    self.segment(*(kept[restore] for restore in self.inputs))
            except _Stop:
                return
        if record.refilled < len(record.slots):
            raise record.refuse(f"it saves {record.refilled} of {len(record.slots)} tensors")

    def restore(self, stack: contextlib.ExitStack) -> None:
        if self.autocast or _is_any_autocast_enabled():
            for then in self.autocast or [(device, None, False) for device in ("cpu", "cuda")]:
                stack.enter_context(torch.autocast(*then))
        for generator, state in self.drawn:
            stack.callback(set_state, generator, read_state(generator))
            set_state(generator, state)
        changed = [(m._buffers, *item) for m in self.norms for item in m._buffers.items()]
        states = [(m._buffers if k in m._buffers else vars(m), k, v) for m, k, v in self.states]
        for table, key, value in changed + states:
            stack.callback(table.__setitem__, key, table[key])
            table[key] = None if value is None else value.clone()


def _keep(value: Any) -> Callable[[], Any]:
    """Keeps a tensor as autograd does: its version is checked, an outer segment recomputes it."""
    return save_tensor(value) if isinstance(value, Tensor) else lambda: value


def warn_caller(message: str) -> None:
    """Warns with an :class:`FxmemWarning` at the innermost line of the user's."""
    if torch.compiler.is_compiling():  # which cannot follow frames
        warnings.warn(message, FxmemWarning, stacklevel=2)
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_globals.get("__name__", "").split(".")[0] in _OURS
        or frame.f_code.co_filename.startswith(_GENERATED)
    ):
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        FxmemWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__", ""),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def overwrite_by_method(name: str, value: Tensor, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of a tensor that ends in ``_``, or the one without it.

    >>> x = torch.ones(2, 1)
    >>> with torch.no_grad():
    ...     overwrite_by_method("add_", x, 1.0) is x
    ...     overwrite_by_method("add_", x, torch.ones(3)).shape
    True
    torch.Size([2, 3])
    """
    broadcast: Any = torch.broadcast_shapes
    others = [other.shape for other in (*args, *kwargs.values()) if isinstance(other, Tensor)]
    fits = _may_overwrite() and broadcast(value.shape, *others) == value.shape
    return getattr(value, name if fits else name[:-1])(*args, **kwargs)


def overwrite_by_function(name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a function of ``torch.nn.functional`` with ``inplace=True``, or without."""
    function = getattr(F, name)
    if "train" in kwargs:  # as torch.dropout calls it
        kwargs["training"] = kwargs.pop("train")
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    given["inplace"] = _may_overwrite()
    return function(**given)


def overwrite_by_module(module: nn.Module, value: Tensor) -> Any:
    """Runs an activation or a dropout as if it were made with ``inplace=True``.

    >>> x = torch.tensor([-1.0, 2.0])
    >>> with torch.no_grad():
    ...     overwrite_by_module(nn.ReLU(), x) is x, x
    (True, tensor([0., 2.]))
    """
    kind = type(module)
    if getattr(nn, kind.__name__, None) is not kind or not _may_overwrite():
        return module(value)
    if isinstance(module, nn.Sigmoid | nn.Tanh):
        return value.sigmoid_() if isinstance(module, nn.Sigmoid) else value.tanh_()
    settings = {key: held for key, held in vars(module).items() if not key.startswith("_")}
    changed: Any = SimpleNamespace(**{**settings, "inplace": True})
    return kind.forward(changed, value)


def _may_overwrite() -> bool:
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling())  # which decides itself
