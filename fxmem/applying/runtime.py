"""Segments that save nothing for backward, which recomputes them: activation checkpoints.

The semantics are those of ``torch.utils.checkpoint(use_reentrant=False)``, at a fraction of its
cost (``benchmarks/overhead.py``). In the first run, hooks give autograd an empty slot in the place
of each tensor that it saves. When backward asks for the first one, the segment runs again, stops
once as many tensors were saved as in the first run, and so fills the slots that are still there. A
slot gives its tensor away once: memory is freed as backward proceeds. A segment within another one
is a segment in every run of the outer one. Beyond PyTorch's: batch statistics are counted once,
random states are kept only where the segment draws, and parameters that change between the two
runs are an error rather than wrong gradients.

Source: ``torch/utils/checkpoint.py``, ``_CheckpointFrame`` and its hooks.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _autograd
from torch.autograd.graph import saved_tensors_hooks

from fxmem.applying.warning import warn_caller
from fxmem.errors import UsageError
from fxmem.tracing import tracer
from fxmem.tracing.state import list_generators, read_state, set_state

_alone = threading.RLock()  # backward has a thread for each device, and this borrows buffers


@torch.compiler.disable  # type: ignore[untyped-decorator]
def checkpoint(
    segment: Callable[..., Any],
    *inputs: Any,
    norms: Sequence[nn.Module] = (),
    states: Sequence[tuple[nn.Module, str]] = (),
    name: str = "",
) -> Any:
    """Runs a segment without saving what its backward needs, which runs the segment again.

    Args:
        segment: The code of the segment.
        inputs: Its arguments, held until its backward is over.
        norms: Its batch normalisations, whose statistics the second run must not update.
        states: Other tensors that it updates, as modules and attributes: the second run begins
            with the values that the first began with, and leaves no trace.
        name: Name of the segment in errors; that of its function by default.

    Raises:
        UsageError: In backward: an input or a parameter was modified in place since the first run,
            or the second run does not save the tensors that the first one did.
    """
    if not torch.is_grad_enabled():
        return segment(*inputs)
    has_hooks = _autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    if not has_hooks or torch._C._functorch.peek_interpreter_stack() is not None:
        warn_caller(
            "torch.func's transforms do not allow checkpoints: this step runs without the plan"
        )
        return segment(*inputs)
    held = [(m, key, getattr(m, key).detach().clone()) for m, key in states]
    frame = _Frame(segment, norms, held, name or getattr(segment, "__name__", "a segment"))
    return tracer.run_segment(frame.run, *inputs)


class _Slot:
    __slots__ = ("__weakref__", "tensor")
    tensor: Tensor | None


class _Stop(Exception):
    """Raised where all that the first run saved is there again."""


class _Record:
    """What a segment saves, without tensors: modules may keep graphs, as ``weight_norm`` does."""

    __slots__ = ("inputs", "name", "refilled", "saved", "slots")

    def __init__(self, name: str) -> None:
        self.name, self.refilled = name, 0
        self.inputs: Sequence[int] = ()
        self.slots: list[weakref.ref[_Slot]] = []
        self.saved: list[tuple[Any, ...]] = []  # what the tensors of the slots are like

    def pack(self, tensor: Tensor) -> _Slot:
        slot = _Slot()
        slot.tensor = None
        self.slots.append(weakref.ref(slot))
        self.saved.append(self.describe(tensor))
        return slot

    def refill(self, tensor: Tensor) -> Tensor:
        then, now = self.saved[self.refilled], self.describe(tensor)
        if then[:2] != now[:2]:
            raise self.refuse(f"it saves {now[:2]} in the place of {then[:2]}")
        if then[2] != now[2]:
            raise self.refuse("parameters were frozen or unfrozen since forward")
        if then != now:
            raise self.refuse(f"its parameter of {now[:2]} was modified or replaced since forward")
        slot = self.slots[self.refilled]()
        self.refilled += 1
        tensor = tensor.detach() if tensor.requires_grad else tensor
        if slot is not None:
            slot.tensor = tensor
        if self.refilled == len(self.slots):
            raise _Stop
        return tensor

    def describe(self, tensor: Tensor) -> tuple[Any, ...]:
        """What both runs agree on: of parameters, also which one it is, and its version."""
        if not tensor.requires_grad:
            return tensor.shape, tensor.dtype, False
        base: Any = tensor._base if tensor._is_view() else tensor
        if base.is_leaf and isinstance(base, nn.Parameter) and id(base) not in self.inputs:
            return tensor.shape, tensor.dtype, True, id(base), base._version
        return tensor.shape, tensor.dtype, True

    def refuse(self, reason: str) -> UsageError:
        message = f"{self.name} of the plan cannot be recomputed in backward: {reason}"
        return UsageError(message, hint="change parameters, mode and attributes after backward")


class _Frame:
    """One run of a segment, and all that it takes to repeat the run."""

    __slots__ = ("autocast", "drawn", "inputs", "norms", "record", "segment", "states")

    def __init__(self, segment: Any, norms: Any, states: Any, name: str) -> None:
        self.segment, self.norms, self.states, self.record = segment, norms, states, _Record(name)

    def run(self, *inputs: Any) -> Any:
        # One that is given twice stays one object, as nn.MultiheadAttention wants.
        self.record.inputs = ids = (*map(id, inputs),)
        kept = {key: _keep(value) for key, value in zip(ids, inputs, strict=True)}
        self.inputs = [kept[key] for key in ids]
        self.autocast = [_read_autocast("cpu"), _read_autocast("cuda")]
        self.drawn = [(generator, read_state(generator)) for generator in list_generators(inputs)]
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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def recompute(self) -> None:
        record = self.record
        try:
            kept = {restore: restore() for restore in self.inputs}
        except RuntimeError as error:
            is_changed = "inplace operation" in str(error)
            reason = "its input was modified in place since forward"
            raise record.refuse(reason) if is_changed else error from None
        inputs = [kept[restore] for restore in self.inputs]
        record.refilled = 0
        with contextlib.ExitStack() as stack:
            for then in self.autocast:
                if then[2] or torch.is_autocast_enabled(then[0]):
                    stack.enter_context(torch.autocast(*then))
            for generator, state in self.drawn:
                stack.callback(set_state, generator, read_state(generator))
                set_state(generator, state)
            for table, key, value in [*_list_changed(self.norms, self.states)]:
                stack.callback(table.__setitem__, key, table[key])
                table[key] = None if value is None else value.clone()
            try:
                with torch.enable_grad(), saved_tensors_hooks(record.refill, lambda t: t):
                    self.segment(*inputs)
            except _Stop:
                return
        raise record.refuse(f"it saves {record.refilled} of {len(record.slots)} tensors")


def _keep(value: Any) -> Callable[[], Any]:
    """Keeps a tensor as autograd does: its version is checked, an outer segment recomputes it."""
    if not isinstance(value, Tensor):
        return lambda: value
    return _autograd._make_saved_tensor(value, is_output=False).unpack


def _read_autocast(device: str) -> tuple[str, torch.dtype, bool, bool]:
    is_enabled = torch.is_autocast_enabled(device)
    return device, torch.get_autocast_dtype(device), is_enabled, torch.is_autocast_cache_enabled()


def _list_changed(norms: Sequence[nn.Module], states: Sequence[Any]) -> Iterator[Any]:
    """The tensors that the second run gets copies of: tables of modules, keys and values."""
    for module in norms:
        yield from ((module._buffers, *item) for item in module._buffers.items())
    for module, key, value in states:
        yield module._buffers if key in module._buffers else vars(module), key, value
