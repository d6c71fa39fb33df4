"""Calls of operators as a recorder sees them, and handlers that keep calls from being recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from fxmem.errors import TraceError
from fxmem.fakes.devices import translate_inside_operator
from fxmem.fakes.fake_mode import is_wrapper
from fxmem.fakes.sparse import raise_layout
from fxmem.kernels.registry import Backend
from fxmem.parallelism.collectives import is_count, run_collective
from fxmem.parallelism.foreach import run_on_locals
from fxmem.recording.sparse import BAG, BAG_IS_SPARSE, MAKERS, run_on_parts
from fxmem.source import find_source
from fxmem.versions.operators import aten

if TYPE_CHECKING:
    from fxmem.recording.recorder import Recorder

_detach = aten.detach.default
PASS: Any = object()
"""Result of a handler that leaves a call to the next one."""
_MOST_ELEMENTS = 1 << 45
"""A tensor with more is a slip in an input's size; kernels' block counts overflow far above it."""


class DispatchedCall(NamedTuple):
    """A call of an operator that the recorder sees, with the tensors in its arguments."""

    func: Any
    types: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]


Handler: TypeAlias = Callable[[Any, DispatchedCall], Any]
"""Takes a recorder's call and returns its result, or PASS."""


def run_own(recorder: Recorder, call: DispatchedCall) -> Any:
    """Runs the recorder's own operators, which are no part of the step."""
    if not recorder.is_packing:
        return PASS
    if call.func is _detach:
        return recorder.runner.detach(*call.args)
    return call.func(*call.args, **call.kwargs)


def run_library(recorder: Recorder, call: DispatchedCall) -> Any:
    """Runs the Python that a library has for a kernel, whose operators are recorded."""
    target, func = recorder.target, call.func
    if func.namespace not in target.python_kernels:
        return PASS
    kinds = torch._C.DispatchKey
    keys = torch._C.DispatchKeySet(getattr(kinds, target.name.upper()))
    parts = torch._C._SetExcludeDispatchKeyGuard(kinds.AutogradFunctionality, False)  # linear's mm
    launch_nothing = target.python_kernels[func.namespace]
    with recorder, torch.no_grad(), parts, launch_nothing():
        return func.redispatch(keys, *call.args, **call.kwargs)


def run_wrapper(recorder: Recorder, call: DispatchedCall) -> Any:
    """Lets a tensor subclass run the operator on the tensors within, such as a DTensor's local."""
    if not any(map(is_wrapper, call.types)):
        return PASS
    recorder.engine.see_wrapper()
    with recorder:
        result = run_on_locals(call.func, call.args, call.kwargs)
        if result is not NotImplemented:
            return result
        with translate_inside_operator():
            for kind in call.types:
                if is_wrapper(kind) and not kind.__module__.startswith("torch."):
                    result = kind.__torch_dispatch__(call.func, call.types, call.args, call.kwargs)
                    if result is not NotImplemented:
                        return result
        return NotImplemented


def run_sparse(recorder: Recorder, call: DispatchedCall) -> Any:
    """Runs an operator on sparse tensors as operators on their indices and values."""
    func = call.func
    is_bag = func is BAG and call.args[BAG_IS_SPARSE]
    if is_bag or func in MAKERS or any(tensor.is_sparse for tensor in call.tensors):
        return run_on_parts(recorder, func, call.args, call.kwargs)
    return PASS


def run_marker(_recorder: Recorder, call: DispatchedCall) -> Any:
    """Runs the profiler's operators, which mark a place in the code."""
    if call.func.namespace != "profiler":
        return PASS
    with no_dispatch():
        return call.func(*call.args, **call.kwargs)


def run_count(_recorder: Recorder, call: DispatchedCall) -> Any:
    """Runs an operator on the counts of a reducer, which are real tensors."""
    if not is_count(call.func, call.tensors, call.kwargs):
        return PASS
    with no_dispatch():
        if call.func.namespace == "c10d":
            return run_collective(call.func, call.args)
        return call.func(*call.args, **call.kwargs)


def turn_devices(
    target: Backend, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turns devices of the target's type that code below torch functions names.

    No mode of torch functions sees a call that one makes, as ``loss_parallel`` moves a target
    (``torch/distributed/tensor/parallel/loss.py``).
    """
    named, device = kwargs.get("device"), target.device
    if named is not None and named.type == target.name != device.type:
        kwargs = {**kwargs, "device": device}
    if len(args) > 1 and type(args[1]) is torch.device:  # aten::to.device
        is_turned = args[1].type == target.name != device.type
        args = (args[0], device if is_turned else args[1], *args[2:])
    return args, kwargs


def refuse_results(tensors: Iterable[Tensor]) -> None:
    """Raises an error for a tensor of another layout, or with more elements than a device holds."""
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise_layout(tensor)
        if tensor.numel() > _MOST_ELEMENTS:
            source = find_source()
            at, size = f" at {source}" if source else "", "x".join(map(str, tensor.shape))
            raise TraceError(
                f"a tensor of {size} elements{at} fits no device",
                hint="check the inputs' sizes",
            )
