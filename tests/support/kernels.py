"""Compares a kernel's fake outputs and its workspace with the CPU profiler's events."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves, tree_map_only

from fxmem.kernels.cpu import CPU


def new_bytes(outputs: object) -> int:
    """Bytes of the outputs' storages."""
    if isinstance(outputs, Tensor):
        return outputs.untyped_storage().nbytes()
    if isinstance(outputs, (tuple, list)):
        return sum(map(new_bytes, outputs))
    return 0


def measure(call: Callable[[], object]) -> tuple[int, object]:
    """Bytes at the peak of a second call, beyond what was live before, and the outputs."""
    with torch._C._AutoDispatchBelowAutograd():
        call()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            outputs = call()
    result = profiler.profiler
    assert result is not None and result.kineto_results is not None
    events = [e for e in result.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, outputs


def check(func: OpOverload, *args: object, enable_grad: bool = False, **kwargs: object) -> object:
    """Assert that fake outputs and the estimate add up to what the real kernel needs."""
    with torch.set_grad_enabled(enable_grad):
        peak, outputs = measure(lambda: func(*args, **kwargs))
        with FakeTensorMode() as mode:
            fakes, fake_kwargs = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
            kernel = CPU.kernels.get(func)
            fake_outputs = kernel(*fakes, **fake_kwargs) if kernel else NotImplemented
            if fake_outputs is NotImplemented:
                fake_outputs = func(*fakes, **fake_kwargs)
        predicted = CPU.estimate_workspace_bytes(func, fakes, fake_kwargs, fake_outputs)
    old = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
    created = [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]
    created = [x for x in created if x.untyped_storage()._cdata not in old]
    measured = max(0, peak - new_bytes(created))
    assert predicted == measured, f"{func}: predicted {predicted}, measured {measured}"
    assert new_bytes(fake_outputs) == new_bytes(outputs), f"{func}: {fake_outputs}"
    return outputs


def strided(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A random tensor whose last two dimensions are transposed in memory."""
    return torch.randn(*sizes[:-2], sizes[-1], sizes[-2]).to(dtype).transpose(-1, -2)


def check_workspace(func: OpOverload, *args: object, **kwargs: object) -> object:
    """As ``check``, for an operator whose outputs' sizes depend on values."""
    with torch.no_grad():
        peak, outputs = measure(lambda: func(*args, **kwargs))
    predicted = CPU.estimate_workspace_bytes(func, args, kwargs, outputs)
    old = {x.untyped_storage()._cdata for x in tree_leaves(args) if isinstance(x, Tensor)}
    created = [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]
    created = [x for x in created if x.untyped_storage()._cdata not in old]
    measured = max(0, peak - new_bytes(created))
    assert predicted == measured, f"{func}: predicted {predicted}, measured {measured}"
    return outputs
