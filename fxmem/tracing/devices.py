"""Accelerators that the user's code names, on a machine that may have none of them.

``x.cuda()``, ``torch.zeros(8, device="cuda")`` and the like mean: where the model runs. An
analysis runs no model anywhere; its tensors are fake ones on the CPU, and fake tensors on an
accelerator abort the process where PyTorch was built without it. So within
:func:`replace_devices` such names mean the device of the fake tensors.
``torch.cuda.is_available()`` says what is true: code that asks first gets its own answer for a
machine without a GPU.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _device

_NO_INDEX = -1
"""Result of ``tensor.get_device()`` on the CPU."""
_HOST = torch.device("cpu")
_ACCELERATOR = re.compile(r"(cuda|mps|xpu|npu|hpu|mtia|xla)(:\d+)?")
_BY_POSITION = frozenset({Tensor.cuda, Tensor.to, Tensor.pin_memory})
"""Functions that need no keyword to move a tensor."""
_MARK = "_fxmem_on_accelerator"
_CUDA_STUBS: Mapping[str, Callable[..., Any]] = {
    "synchronize": lambda device=None: None,
    "set_device": lambda device: None,
    "current_device": lambda: 0,
    "_exchange_device": lambda device: 0,  # what entering and leaving torch.cuda.device(0) calls
    "_maybe_exchange_device": lambda device: 0,
}
"""Functions that choose a GPU or wait for one: nothing runs there."""


@contextlib.contextmanager
def replace_devices(named: set[str], device: torch.device = _HOST) -> Iterator[None]:
    """Has every accelerator that the code names mean the device of the target's fake tensors.

    The names are added to ``named`` as the code wrote them.

    >>> named = set()
    >>> with replace_devices(named):
    ...     torch.zeros(2, device="cuda").cuda().to("cuda:1").device
    device(type='cpu')
    >>> sorted(named)
    ['cuda', 'cuda:1']
    """
    replaced = {name: getattr(torch.cuda, name) for name in _CUDA_STUBS}
    for name, stub in _CUDA_STUBS.items():
        setattr(torch.cuda, name, stub)
    try:
        with _ReplaceDevices(named, device):
            yield
    finally:
        for name, function in replaced.items():
            setattr(torch.cuda, name, function)


@contextlib.contextmanager
def keep_default_on_cpu() -> Iterator[None]:
    """Makes nothing on an accelerator that is the default device, as the user set it.

    For what fxmem makes itself: :func:`replace_devices` takes longer, and does this too.
    """
    if _device.CURRENT_DEVICE is None:
        yield
        return
    with _HOST:
        yield


class _ReplaceDevices(TorchFunctionMode):
    def __init__(self, named: set[str], device: torch.device) -> None:
        super().__init__()
        self._named = named
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not kwargs and func not in _BY_POSITION and _device.CURRENT_DEVICE is None:
            return func(*args)
        if func is Tensor.pin_memory:  # which makes a copy faster that is not made
            return args[0]
        if func is Tensor.cuda:
            self._named.add("cuda")
            return mark_on_accelerator(args[0])
        args, kwargs = list(args), dict(kwargs or {})
        is_moved = False
        for position, value in enumerate(args if func in _BY_POSITION else ()):
            if _is_accelerator(value):
                args[position], is_moved = self._replace(value), True
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        device = kwargs.get("device")
        if device is None and func in _device._device_constructors():
            device = _device.CURRENT_DEVICE  # torch.set_default_device, with torch.device(...):
        if _is_accelerator(device):
            kwargs["device"], is_moved = self._replace(device), True
        elif device is not None:
            kwargs["device"] = device
        result = func(*args, **kwargs)
        return mark_on_accelerator(result) if is_moved else result

    def _replace(self, device: Any) -> torch.device:
        if device != _NO_INDEX:
            self._named.add(f"cuda:{device}" if isinstance(device, int) else str(device))
        return self._device


def lies_on_accelerator(tensor: Tensor) -> bool:
    """Tells whether the user put a tensor on an accelerator, were there one."""
    return tensor.device.type not in ("cpu", "meta") or _MARK in tensor.__dict__


def mark_on_accelerator(result: Any) -> Any:
    """Notes of a tensor that the user has it on an accelerator."""
    if isinstance(result, Tensor):
        result.__dict__[_MARK] = True
    return result


def _is_accelerator(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type not in ("cpu", "meta")
    if isinstance(device, str):
        return _ACCELERATOR.fullmatch(device) is not None
    return isinstance(device, int) and not isinstance(device, bool)
