"""Devices as a step on a GPU sees them, on a machine without one.

A tensor on the GPU is a fake one on ``cpu:0`` (:mod:`fxmem.kernels.cuda.gpu`). The user's code
must not notice: it reads ``x.device`` to make a tensor beside ``x``, asks ``x.is_cuda`` or compares
``x.device.type``. Within :func:`view_devices` such questions are answered with ``cuda:0``, and
devices that the code names are turned back before an operator runs.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _device, _foreach_utils

from fxmem.kernels.cuda.gpu import CUDA, GPU_DEVICE, is_on_gpu
from fxmem.patching import patch
from fxmem.tracing.fakes import find_inner
from fxmem.versions.operators import aten

_SEEN = torch.device("cuda", 0)
"""The device that the user's code sees; never handed to an operator."""
_HOST = torch.device("cpu")
_AUTOCASTS = frozenset({"torch.amp.autocast_mode", "torch._library.custom_ops"})
"""Modules that cast what is on CUDA, for autograd functions and operators of the user."""
_MAKES_DTENSOR = "torch.distributed.tensor._api", "__new__"
"""Module and function that made, until PyTorch 2.9, a DTensor on the device that it sees."""
_ACCELERATOR = re.compile(r"cuda(:\d+)?")
_FakeDevice = Callable[[FakeTensor], torch.device]
_get_device: Any = Tensor.device.__get__
_get_is_cuda: Any = Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_get_is_cpu: Any = Tensor.is_cpu.__get__  # type: ignore[attr-defined]


@contextlib.contextmanager
def view_devices(device: torch.device) -> Iterator[None]:
    """Shows fake tensors on a device as tensors on CUDA's first.

    PyTorch's private packages (fake kernels, decompositions) and fxmem itself see what is.

    Args:
        device: Where the fake tensors of the GPU lie.
    """
    real: _FakeDevice = FakeTensor.device.fget  # type: ignore[attr-defined]

    view = _DeviceView(device)

    def see(tensor: FakeTensor) -> torch.device:
        found = real(tensor)
        # A fake is on meta while a kernel runs on any, in another thread too.
        if found != device and not (found.type == "meta" and tensor.fake_device == device):
            return found
        frame = sys._getframe(1)
        module = str(frame.f_globals.get("__name__", ""))  # exec may give none
        internal = module.startswith(("torch._", "torch.utils.", "fxmem."))
        internal |= (module, frame.f_code.co_name) == _MAKES_DTENSOR
        if module in _AUTOCASTS or not (view.is_busy or internal):
            return _SEEN
        return found

    with patch({FakeTensor: {"device": property(see)}}), view:
        yield


class _Thread(threading.local):
    is_busy = False


class _DeviceView(TorchFunctionMode):
    """Answers what functions say of devices, and turns those that they are given.

    Attributes:
        is_busy: A function is running in this thread; its calls do not pass through the mode.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._thread = _Thread()

    @property
    def is_busy(self) -> bool:
        return self._thread.is_busy

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _ANSWERS:  # of what else is asked, fake kernels' meta tensors among them
            inner = find_inner(args[0])
            is_on_gpu = isinstance(inner, FakeTensor) and inner.fake_device == self._device
            if inner is not args[0] and _is_of_checkpoint(sys._getframe(1)):
                is_on_gpu = False  # as in its hooks, which run where this mode does not
            return _ANSWERS[func] if is_on_gpu else func(*args)
        was_busy, self._thread.is_busy = self.is_busy, True
        try:
            return self._run(func, args, kwargs or {})
        finally:
            self._thread.is_busy = was_busy

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.device:  # a number is one of the accelerator's, of which there is none
            return func("cuda", *args) if args and type(args[0]) is int else func(*args, **kwargs)
        if func is Tensor.cuda:
            return Tensor.to(args[0], self._device)
        if func is Tensor.cpu:
            return Tensor.to(args[0], _HOST)
        if func is Tensor.type and len(args) == 1 and not kwargs and is_on_gpu(args[0]):
            return str(func(*args)).replace("torch.", "torch.cuda.")
        if func is Tensor.pin_memory:  # a copy in the host's memory, as it was there before
            return args[0].clone()
        if func is Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], self._device, *args[2:])
        elif func is torch._C._nn._parse_to and args and type(args[0]) is int:  # of module.to(0)
            args = (self._device, *args[1:])
        device = kwargs.get("device")
        if device is None and func is not Tensor.new_tensor:
            device = _device.CURRENT_DEVICE  # torch.set_default_device, with torch.device(...):
        if func in _FROM_VALUES and device is not None:
            # Made on the host, as on a machine with a GPU, and copied.
            device = self._turn_device(device)
            made = func(*args, **{k: v for k, v in kwargs.items() if k != "device"})
            return Tensor.to(made, device)
        for argument in args:
            if type(argument) is torch.device or type(argument) is str:
                args = tuple(map(self._turn, args))
                break
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self._turn_device(kwargs["device"])}
        return func(*args, **kwargs)

    def _turn_device(self, value: Any) -> Any:
        return self._device if type(value) is int else self._turn(value)

    def _turn(self, value: Any) -> Any:
        if type(value) is torch.device:
            return self._device if value.type == "cuda" else value
        if type(value) is str and _ACCELERATOR.fullmatch(value):
            return self._device
        return value


def _is_of_checkpoint(frame: FrameType | None) -> bool:
    """Tells whether ``torch.utils.checkpoint`` asks, through fxmem's own modes."""
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("fxmem."):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "torch.utils.checkpoint"


_FROM_VALUES = frozenset({torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor})
"""Functions that make tensors of values: fake tensors of them are where the values are."""
_ANSWERS: dict[Any, Any] = {
    _get_device: _SEEN,
    _get_is_cuda: True,
    _get_is_cpu: False,
    Tensor.get_device: _SEEN.index,
}
"""Answers of a tensor on the GPU."""


# -- Context managers of a step --

_to_copy = aten._to_copy.default


@CUDA.kernel(_to_copy)
def _copy_constant(tensor: Tensor, **kwargs: Any) -> Any:
    """A copy of what has a known value takes the device of that value, which is the host."""
    device = kwargs.get("device")
    if device is None or getattr(tensor, "constant", None) is None:
        return NotImplemented
    result = _to_copy(tensor, **kwargs)
    result.fake_device = device
    result.constant = None  # what PyTorch computes from it would lie on the host again
    return result


@CUDA.context
def _view_gpu() -> contextlib.AbstractContextManager[None]:
    return view_devices(GPU_DEVICE)


@CUDA.context
def _update_together() -> contextlib.AbstractContextManager[None]:
    """Optimizers update all parameters together where all are plain tensors on a GPU.

    ``torch/optim/optimizer.py``, ``_default_to_fused_or_foreach``: by their exact type; as does
    ``torch.nn.utils.clip_grad_norm_``, by ``torch/utils/_foreach_utils.py``.
    """
    name, modules = "_foreach_supported_types", (optimizer, _foreach_utils)
    return patch({module: {name: [*vars(module)[name], FakeTensor]} for module in modules})
