"""Translation of the devices that the user's code names and asks for.

``x.cuda()``, ``torch.zeros(8, device="cuda")`` and the like mean: where the model runs. An analysis
runs no model anywhere; its tensors are fake ones on the CPU, and fake tensors on an accelerator
abort the process where PyTorch was built without that accelerator. So within
:func:`translate_devices` such names mean the device of the fake tensors. Where that is not the
host's, but stands for a GPU (:mod:`fxmem.kernels.cuda.gpu`), the code must not notice: it reads
``x.device`` to make a tensor beside ``x``, asks ``x.is_cuda`` or compares ``x.device.type``. Such
questions are answered with ``cuda:0``.
"""

from __future__ import annotations

import contextlib
import operator
import re
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _device

from fxmem.fakes.fake_mode import find_inner, mark_on_accelerator, overrides_functions
from fxmem.patching import patch

SEEN = torch.device("cuda", 0)
"""The device that the user's code sees; never handed to an operator."""
_HOST = torch.device("cpu")
_NO_INDEX = -1
"""Result of ``tensor.get_device()`` on the CPU."""
_ACCELERATOR = re.compile(r"(cuda|mps|xpu|npu|hpu|mtia|xla)(:\d+)?")
_AUTOCASTS = frozenset({"torch.amp.autocast_mode", "torch._library.custom_ops"})
"""Modules that cast tensors on CUDA, for autograd functions and operators of the user."""
_ANSWERS: dict[Any, Any] = {
    Tensor.device.__get__: SEEN,
    Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]
    Tensor.get_device: SEEN.index,
}
"""Answers of a tensor on the GPU."""
_FROM_VALUES = frozenset({torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor})
"""Functions that make tensors of values: fake tensors of them are where the values are."""
_translators: list[_Translator] = []
_parse_to = torch._C._nn._parse_to
_SPELLED = frozenset({Tensor.type, Tensor.new, Tensor.new_tensor})
_SPECIAL = _FROM_VALUES | {
    *(torch.device, _parse_to, Tensor.cuda, Tensor.cpu, Tensor.to, Tensor.type, Tensor.pin_memory)
}
_STUBS: dict[str, Callable[..., Any]] = {  # each of its own: Dynamo has a rule for each
    "synchronize": lambda device=None: None,
    "set_device": lambda device: None,
    # What entering and leaving torch.cuda.device(0) calls.
    "current_device": lambda: 0,
    "_exchange_device": lambda device: 0,
    "_maybe_exchange_device": lambda device: 0,
}
"""Functions of ``torch.cuda`` that choose a GPU or wait for one: nothing runs there."""


@contextlib.contextmanager
def translate_devices(
    device: torch.device = _HOST, named: set[str] | None = None
) -> Iterator[None]:
    """Turns every accelerator that the code names into the device of the target's fake tensors.

    PyTorch's private packages (fake kernels, decompositions) and fxmem itself see what is.

    Args:
        device: Where the fake tensors of the target lie.
        named: Takes the names, as the code wrote them.

    >>> named = set()
    >>> with translate_devices(named=named):
    ...     torch.zeros(2, device="cuda").cuda().to("cuda:1").device
    device(type='cpu')
    >>> sorted(named)
    ['cuda', 'cuda:1']
    """
    translator = _Translator(device, set() if named is None else named)
    if device == _HOST:
        with _replace_functions(), translator:
            yield
        return
    real: Callable[[FakeTensor], torch.device] = FakeTensor.device.fget  # type: ignore[attr-defined]

    def see(tensor: FakeTensor) -> torch.device:
        found = real(tensor)
        # A fake is on meta while a kernel runs on any, in another thread too.
        if found != device and not (found.type == "meta" and tensor.fake_device == device):
            return found
        frame = sys._getframe(1)
        module = str(frame.f_globals.get("__name__", ""))  # exec may give none
        internal = module.startswith(("torch._", "torch.utils.", "fxmem."))
        if module in _AUTOCASTS or not (translator.is_busy or internal):
            return SEEN
        return found

    make_wrapper: Callable[..., Tensor] = Tensor._make_wrapper_subclass

    def make_wrapper_on_target(kind: type, *args: Any, **kwargs: Any) -> Tensor:
        """Makes a DTensor or the like, whose class gives the device that it sees."""
        if kwargs.get("device") == SEEN:
            kwargs["device"] = device
        return make_wrapper(kind, *args, **kwargs)

    wrappers = {"_make_wrapper_subclass": staticmethod(make_wrapper_on_target)}
    _translators.append(translator)
    try:
        with patch({FakeTensor: {"device": property(see)}, Tensor: wrappers}), translator:
            yield
    finally:
        _translators.remove(translator)


@contextlib.contextmanager
def translate_inside_operator() -> Iterator[None]:
    """Sees the functions that an operator calls within: those of a tensor subclass's dispatch.

    torchao's NF4 makes a table beside its data there: ``torch.tensor(levels, device=x.device)``.
    """
    translator = _translators[-1] if _translators else None
    if translator is None or not translator.is_busy:
        yield
        return
    with translator.listen():
        yield


@contextlib.contextmanager
def _replace_functions() -> Iterator[None]:
    try:
        with patch({torch.cuda: _STUBS}):
            yield
    finally:  # Dynamo's rules, if made within, are those of functions that are gone now
        if rules := sys.modules.get("torch._dynamo.trace_rules"):
            rules.clear_lru_cache()


def keep_default_on_cpu() -> contextlib.AbstractContextManager[Any]:
    """Makes nothing on an accelerator that is the default device, as the user set it.

    For tensors that fxmem makes: :func:`translate_devices` takes longer, and does this too.
    """
    return contextlib.nullcontext() if _device.CURRENT_DEVICE is None else _HOST


class _Translator(TorchFunctionMode):
    """Answers questions about devices, and turns the devices that functions are given.

    Attributes:
        is_busy: A function is running in this thread; its calls do not pass through the mode.
    """

    def __init__(self, device: torch.device, named: set[str]) -> None:
        super().__init__()
        self._device = device
        self._named = named
        self._is_gpu = device != _HOST
        self._thread = threading.local()

    @property
    def is_busy(self) -> bool:
        return getattr(self._thread, "is_busy", False)

    @property
    def _opened(self) -> Any:
        return getattr(self._thread, "opened", None)

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Answers again within a function that is running."""
        self._thread.is_busy = False
        try:
            with self:
                yield
        finally:
            self._thread.is_busy = True

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _ANSWERS:  # of what else is asked, fake kernels' meta tensors among them
            inner = find_inner(args[0])
            is_on_gpu = self._is_gpu and self._has(inner)
            if is_on_gpu and inner is not args[0] and _is_of_checkpoint(sys._getframe(1)):
                is_on_gpu = False  # as in its hooks, which run where this mode does not
            return _ANSWERS[func] if is_on_gpu else func(*args)
        was_busy, self._thread.is_busy = self.is_busy, True
        try:
            kwargs = kwargs or {}
            if kwargs or func in _SPELLED or _device.CURRENT_DEVICE is not None:
                func, args, kwargs = spell_device(func, args, kwargs)
            if func in _SPECIAL:
                result = self._run_special(func, args, kwargs)
                if result is not NotImplemented:
                    return result
            is_moved, args, kwargs = self._turn_all(args, kwargs)
            if func != self._opened and any(map(overrides_functions, types)):
                result = self._run_overridden(func, types, args, kwargs)
            else:
                result = func(*args, **kwargs)
            return mark_on_accelerator(result) if is_moved and not self._is_gpu else result
        finally:
            self._thread.is_busy = was_busy

    def _run_overridden(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs what a subclass has in the place of a function, in which this mode answers, too."""
        opened, self._thread.opened = self._opened, func  # which it may call itself
        try:
            for kind in filter(overrides_functions, types):
                with self.listen():
                    result = kind.__torch_function__(func, types, args, kwargs)
                if result is not NotImplemented:
                    return result
            return func(*args, **kwargs)
        finally:
            self._thread.opened = opened

    def _turn_all(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, tuple[Any, ...], dict[str, Any]]:
        """Turns the devices among arguments, and returns whether there were any."""
        is_moved = False
        for argument in args:
            if type(argument) is torch.device or type(argument) is str:
                turned = tuple(map(self._turn, args))
                is_moved, args = turned != args, turned
                break
        device = kwargs.get("device")
        if device is not None:
            turned = self._turn_device(device)
            is_moved |= turned is not device
            kwargs = {**kwargs, "device": turned}
        return is_moved, args, kwargs

    def _run_special(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs functions that move tensors or name devices otherwise than all others."""
        if func is torch.device:  # a number is one of the accelerator's, of which there is none
            is_number = self._is_gpu and bool(args) and type(args[0]) is int
            return func("cuda", *args) if is_number else func(*args, **kwargs)
        if func is Tensor.cuda:
            self._named.add("cuda")
            if self._is_gpu:
                return Tensor.to(args[0], self._device)
            return mark_on_accelerator(args[0])
        if func is Tensor.pin_memory:  # a copy in the host's memory, as it was there before
            return args[0].clone() if self._is_gpu else args[0]
        if func is Tensor.cpu and self._is_gpu:
            return Tensor.to(args[0], _HOST)
        if func is Tensor.type and len(args) == 1 and not kwargs and self._has(find_inner(args[0])):
            return str(func(*args)).replace("torch.", "torch.cuda.")
        at = {Tensor.to: 1, _parse_to: 0}.get(func, len(args))
        if at < len(args) and type(args[at]) is int:  # module.to(0)
            turned = self._turn_device(args[at])
            result = func(*args[:at], turned, *args[at + 1 :], **kwargs)
            return result if self._is_gpu else mark_on_accelerator(result)
        if func in _FROM_VALUES and self._is_gpu and kwargs.get("device") is not None:
            # Made on the host, as on a machine with a GPU, and copied.
            device = self._turn_device(kwargs["device"])
            kwargs = {name: value for name, value in kwargs.items() if name != "device"}
            is_leaf = kwargs.pop("requires_grad", False)
            if _device.CURRENT_DEVICE is not None and not isinstance(args[0], Tensor):
                kwargs["device"] = _HOST
            made = Tensor.to(func(*args, **kwargs), device)
            return made.requires_grad_() if is_leaf else made
        return NotImplemented

    def _has(self, tensor: Tensor) -> bool:
        return isinstance(tensor, FakeTensor) and tensor.fake_device == self._device != _HOST

    def _turn_device(self, value: Any) -> Any:
        if type(value) is not int:
            return self._turn(value)
        if value != _NO_INDEX:
            self._named.add(f"cuda:{value}")
        return self._device

    def _turn(self, value: Any) -> Any:
        if not is_accelerator(value):
            return value
        self._named.add(str(value))
        return self._device


def is_accelerator(value: Any) -> bool:
    """Returns whether a value is a device other than the host's, or the name of one."""
    if type(value) is torch.device:
        return value.type not in ("cpu", "meta")
    return type(value) is str and _ACCELERATOR.fullmatch(value) is not None


def _is_of_checkpoint(frame: FrameType | None) -> bool:
    """Returns whether ``torch.utils.checkpoint`` asks, through fxmem's own modes."""
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("fxmem."):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "torch.utils.checkpoint"


# -- devices that a call does not spell out --------------------------------------------------------


def spell_device(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Writes a call with the device of its result, where the code leaves that to torch."""
    if func is Tensor.type and (kind := find_type(*args[1:])) is not None:
        return Tensor.to, (args[0], "cuda" if kind.is_cuda else "cpu", kind.dtype), {}
    if kwargs.get("pin_memory"):  # which makes copies to a GPU faster
        kwargs = {**kwargs, "pin_memory": False}
    if func is Tensor.new and isinstance(args[0], FakeTensor):
        if args[0].is_sparse:  # torch.optim.SparseAdam
            return torch.sparse_coo_tensor, args[1:], {}
        is_of_values = len(args) == 2 and not isinstance(args[1], int | torch.Size)
        func = Tensor.new_tensor if is_of_values else Tensor.new_empty
        args = args if len(args) == 2 and not isinstance(args[1], int) else (args[0], args[1:])
    if func is Tensor.new_tensor and kwargs.get("device") is None:
        kwargs = {**kwargs, "device": args[0].device, "dtype": args[0].dtype, **kwargs}
    default = _device.CURRENT_DEVICE  # torch.set_default_device, by a mode below these
    is_left = default is not None and kwargs.get("device") is None
    if is_left and func in _device._device_constructors():
        kwargs = {**kwargs, "device": default}
    return func, args, kwargs


class TypeOnGpu:
    """``torch.cuda.FloatTensor`` or the like: makes tensors, and is what ``Tensor.type`` takes."""

    is_cuda = True

    def __init__(self, host_type: Any) -> None:
        self._host_type = host_type
        self.dtype: torch.dtype = host_type.dtype

    def __call__(self, *args: Any) -> Tensor:
        made: Tensor = self._host_type(*args)
        return made.cuda()

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Tensor) and instance.is_cuda and instance.dtype == self.dtype


def find_type(kind: Any = None, *_: Any) -> Any:
    """Finds the type with a device, as ``torch.cuda.FloatTensor`` is, that a type or name means."""
    if isinstance(kind, str) and kind.startswith("torch.") and kind.endswith("Tensor"):
        kind = operator.attrgetter(kind.removeprefix("torch."))(torch)
    return kind if isinstance(kind, TypeOnGpu | type(torch.FloatTensor)) else None
