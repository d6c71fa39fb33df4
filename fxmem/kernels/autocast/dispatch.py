"""CUDA's autocast, for fake tensors of a GPU.

``torch.autocast("cuda")`` keeps its state in the dispatcher's set of keys, with or without a GPU.
What is missing without one is the key ``AutocastCUDA`` on the tensors, and PyTorch's kernels under
that key cast CUDA tensors alone. :func:`lower_autocast` gives every call the key, and those
kernels stand-ins that cast the fake tensors of the GPU by the same policies
(:mod:`fxmem.kernels.autocast.policies`). The rest is PyTorch's own: nesting,
``enabled=False``, ``custom_fwd``, what ``torch.is_autocast_enabled`` answers.

To PyTorch these tensors lie on the CPU. Its kernels for ``torch.autocast("cpu")``, which casts
tensors on the host, have stand-ins too, which leave tensors of the GPU alone.

Source: ``aten/src/ATen/autocast_mode.h``, ``autocast_mode.cpp``, ``torch/amp/autocast_mode.py``.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.nn import functional
from torch.utils.checkpoint import DefaultDeviceType

from fxmem.kernels.autocast import lists
from fxmem.kernels.autocast.policies import (
    CallArguments,
    Policy,
    cast_cached,
    exclude_key,
    find_operators,
    find_policies,
    follow_autocast,
    is_eligible,
    reach_gpu,
)
from fxmem.kernels.common import data_dependent
from fxmem.kernels.cuda.gpu import CUDA, current_state
from fxmem.kernels.cuda.recurrent import count_weights
from fxmem.patching import patch
from fxmem.tracing.conditions import leave_autocast
from fxmem.versions.fallbacks import find_kernel, override_kernel
from fxmem.versions.operators import aten

_DEVICE = "cuda"
_KEY = torch._C.DispatchKey.AutocastCUDA
_HOST_KEY = torch._C.DispatchKey.AutocastCPU
_cudnn_rnn = aten._cudnn_rnn.default


CUDA.function(functional.binary_cross_entropy_with_logits)(
    follow_autocast(aten.binary_cross_entropy_with_logits.default)(
        data_dependent.binary_cross_entropy_with_logits
    )
)


_libraries: list[Any] = []
"""That of the outermost analysis, while one runs."""


@CUDA.context
@contextlib.contextmanager
def lower_autocast() -> Iterator[None]:
    """Makes CUDA's autocast cast fake tensors of the GPU, where the step turns it on.

    On exit all is as it was, autocast's state included. Autocast stays off where there is no GPU:
    see :func:`fxmem.kernels.cuda.present_gpu.show_gpu`.
    """
    clear_cache = torch.clear_autocast_cache

    def clear_all() -> None:
        clear_cache()
        current_state().casts.clear()  # weights are cast anew from now on

    replacements: dict[Any, dict[str, Any]] = {
        torch: {"clear_autocast_cache": clear_all},
        # Whose autocast a checkpoint's recomputation enters: that of the accelerator.
        DefaultDeviceType: {"_default_device_type": _DEVICE},
    }
    with leave_autocast(), patch(replacements):
        try:
            with _override_kernels(), torch._C._IncludeDispatchKeyGuard(_KEY):
                yield
        finally:
            current_state().casts.clear()


@contextlib.contextmanager
def _override_kernels() -> Iterator[None]:
    """Puts kernels in the place of PyTorch's own, which an analysis within another finds there."""
    if _libraries:
        yield
        return
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are overridden: once in a process
            for (operator, key), kernel in _make_kernels().items():
                override_kernel(library, operator, key, kernel)
        yield
    finally:
        _libraries.remove(library)
        library._destroy()  # type: ignore[no-untyped-call]


@functools.cache
def _make_kernels() -> dict[tuple[OpOverload, torch._C.DispatchKey], Callable[..., Any]]:
    """By operator and key. Made once: to find the kernels that they stand in for takes a while."""
    policies = {**find_policies(), _cudnn_rnn: Policy(cast_rnn, _cudnn_rnn)}
    names = torch._C._dispatch_get_all_op_names()
    aten = (name.removeprefix("aten::") for name in names if name.startswith("aten::"))
    on_host = find_operators(aten, _HOST_KEY.name).values()
    return {
        **{(o, _KEY): _make_kernel(o, _KEY, policy) for o, policy in policies.items()},
        **{(o, _KEY): _make_kernel(o, _KEY) for o in find_operators(lists.BANNED).values()},
        **{(o, _HOST_KEY): _make_kernel(o, _HOST_KEY) for o in on_host},
    }


def _make_kernel(
    operator: OpOverload, key: torch._C.DispatchKey, policy: Policy | None = None
) -> Callable[..., Any]:
    """Makes the stand-in for a kernel, which without a policy casts nothing.

    Under the key of the GPU's autocast, the kernel of an operator without a policy only raises.
    """
    original = find_kernel(operator, key)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        on_gpu = reach_gpu(args, kwargs)
        raises = on_gpu and policy is None
        # Another thread may be at work on a GPU meanwhile.
        is_lowered = torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
        if (not on_gpu) if key is _HOST_KEY else (raises or not is_lowered):
            return original(keys, *args, **kwargs)
        run = operator
        with exclude_key(key), torch._C.DisableTorchFunction():
            if on_gpu and policy is not None:
                (args, kwargs), run = policy.cast(args, kwargs), policy.operator
            return run(*args, **kwargs)

    return kernel


def cast_rnn(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
    """Casts the arguments of ``_cudnn_rnn``, the weights into one new buffer of float16.

    To autograd the parts of the buffer are no views: each copy leads back to its weight alone.
    """
    input, weights, stride, buffer, hx, cx, *rest = args
    flat = weights[0] if buffer is None else buffer
    if is_eligible(flat) and flat.dtype != torch.float16:
        options: dict[str, Any] = {"dtype": torch.float16, "device": weights[0].device}
        buffer = torch.zeros(count_weights(weights, stride), **options)
        parts, offset = [], 0
        for weight in weights:
            part = torch.empty(0, **options)
            parts.append(part.set_(buffer.untyped_storage(), offset, (weight.numel(), 1), (1, 1)))
            offset += weight.numel()
        for part, weight in zip(parts, weights, strict=True):
            part.copy_(weight.view_as(part))
        weights = parts
    cx, hx, input = (cast_cached(torch.float16, value) for value in (cx, hx, input))
    return (input, weights, stride, buffer, hx, cx, *rest), kwargs
