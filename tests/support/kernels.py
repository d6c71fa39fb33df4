"""Compares a kernel's fake outputs and its workspace with the CPU profiler's events."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from measuring.profiled import list_changes
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.kernel_workspace import estimate_workspace_bytes
from fxmem.kernels.cpu import CPU
from fxmem.kernels.registry import storage_bytes


def measure(call: Callable[[], object]) -> tuple[int, object]:
    """Bytes at the peak of a second call, beyond what was live before, and the outputs."""
    with torch._C._AutoDispatchBelowAutograd():
        call()
        return measure_peak(call)


def measure_peak(call: Callable[[], object]) -> tuple[int, object]:
    """Bytes at the peak of a call, beyond what was live before, and the outputs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        outputs = call()
    sizes = [nbytes for _, nbytes in list_changes(profiler)]
    return max(accumulate(sizes, initial=0)), outputs


def check(
    func: OpOverload,
    *args: object,
    enable_grad: bool = False,
    layouts: bool = False,
    **kwargs: object,
) -> object:
    """Assert that fake outputs and the estimate add up to what the real kernel needs.

    With ``layouts`` the outputs' dtypes, shapes and strides are compared too.
    """
    with torch.set_grad_enabled(enable_grad):
        peak, outputs = measure(lambda: func(*args, **kwargs))
        with FakeTensorMode() as mode:
            fakes, fake_kwargs = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
            kernel = CPU.kernels.get(func)
            fake_outputs = kernel(*fakes, **fake_kwargs) if kernel else NotImplemented
            if fake_outputs is NotImplemented:
                fake_outputs = func(*fakes, **fake_kwargs)
        predicted = estimate_workspace_bytes(CPU, func, fakes, fake_kwargs, fake_outputs)
    compare(func, predicted, peak, (args, kwargs), outputs)
    assert storage_bytes(fake_outputs) == storage_bytes(outputs), f"{func}: {fake_outputs}"
    assert not layouts or describe(fake_outputs) == describe(outputs), func
    return outputs


def describe(outputs: object) -> list[tuple[object, ...]]:
    """Dtypes, shapes and strides of tensors."""
    tensors = [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]
    return [(x.dtype, tuple(x.shape), x.stride()) for x in tensors]


def strided(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A random tensor whose last two dimensions are transposed in memory."""
    return torch.randn(*sizes[:-2], sizes[-1], sizes[-2]).to(dtype).transpose(-1, -2)


def check_workspace(func: OpOverload, *args: object, **kwargs: object) -> object:
    """As ``check``, for an operator whose outputs' sizes depend on values."""
    with torch.no_grad():
        peak, outputs = measure(lambda: func(*args, **kwargs))
    compare(func, estimate_workspace_bytes(CPU, func, args, kwargs, outputs), peak, args, outputs)
    return outputs


def compare(func: OpOverload, predicted: int, peak: int, operands: object, outputs: object) -> None:
    """Assert that a workspace is what a call takes beside the storages that it makes."""
    old = {x.untyped_storage()._cdata for x in tree_leaves(operands) if isinstance(x, Tensor)}
    created = [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]
    created = [x for x in created if x.untyped_storage()._cdata not in old]
    measured = max(0, peak - storage_bytes(created))
    assert predicted == measured, f"{func}: predicted {predicted}, measured {measured}"
