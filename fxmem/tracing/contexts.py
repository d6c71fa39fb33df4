"""The contexts that code runs in: a graph's nodes run wherever its caller is."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_DEVICES = ("cpu", "cuda")

Autocast = tuple[torch.dtype | None, ...]
"""By device, what code is autocast to; None where it is not."""


@dataclass(frozen=True, slots=True)
class Context:
    """Where code runs.

    Attributes:
        grad: Whether autograd records.
        autocast: By device, what it is autocast to; None where it is not.
    """

    grad: bool
    autocast: Autocast


def read_context() -> Context:
    """The context of the caller.

    >>> with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    ...     read_context()
    Context(grad=False, autocast=(torch.bfloat16, None))
    """
    return Context(torch.is_grad_enabled(), read_autocast())


def read_autocast() -> Autocast:
    """What the caller's code is autocast to.

    >>> read_autocast()
    (None, None)
    """
    return tuple([read_autocast_on(device) for device in _DEVICES])


def read_autocast_on(device: str) -> torch.dtype | None:
    """What the caller's code is autocast to on a device; None for nothing."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


@contextlib.contextmanager
def leave_autocast() -> Iterator[None]:
    """Leaves all autocast that the caller is in: one that is entered within is the outermost.

    The outermost one frees what was cast when it ends (``torch/amp/autocast_mode.py``).
    """
    enabled = {device: torch.is_autocast_enabled(device) for device in _DEVICES}
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    try:
        for device in _DEVICES:
            torch.set_autocast_enabled(device, False)
        yield
    finally:
        for device, is_enabled in enabled.items():
            torch.set_autocast_enabled(device, is_enabled)
        for _ in range(depth):
            torch.autocast_increment_nesting()


def read_settings() -> dict[str, tuple[Any, ...]]:
    """What else code sets around its calls, which no call of a graph can set.

    By what it decides: ``torch.backends``, :func:`torch.nn.attention.sdpa_kernel` and their like,
    and :class:`torch.autograd.graph.saved_tensors_hooks`.

    >>> before = read_settings()
    >>> with torch.autograd.graph.save_on_cpu():
    ...     [name for name, value in read_settings().items() if value != before[name]]
    ['what autograd does with what it saves']
    """
    read: Any = torch._C
    return {
        "which kernels run": (
            read._get_flash_sdp_enabled(),
            read._get_mem_efficient_sdp_enabled(),
            read._get_math_sdp_enabled(),
            read._get_cudnn_sdp_enabled(),
            read._get_cudnn_enabled(),
            read._get_cudnn_benchmark(),
            read._get_cudnn_deterministic(),
            read._get_mkldnn_enabled(),
            read._get_deterministic_algorithms(),
            read._get_float32_matmul_precision(),
        ),
        "the default dtype": (torch.get_default_dtype(),),
        "what autograd does with what it saves": (
            read._autograd._top_saved_tensors_default_hooks(True) or ()
        ),
    }


class Within:
    """A function that runs without gradients, without autocast, or both.

    Attributes:
        function: The function.
        without_grad: Whether autograd does not record it.
        without_autocast: The devices for which it is not autocast.
    """

    def __init__(
        self, function: Callable[..., Any], without_grad: bool, without_autocast: tuple[str, ...]
    ) -> None:
        self.function = function
        self.without_grad = without_grad
        self.without_autocast = without_autocast
        # As torch.fx wants to know them of what a node calls.
        self.__name__ = self.__qualname__ = f"run_{function.__name__}"
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        with contextlib.ExitStack() as stack:
            if self.without_grad:
                stack.enter_context(torch.no_grad())
            for device in self.without_autocast:
                stack.enter_context(torch.autocast(device, enabled=False))
            return self.function(*args, **kwargs)


@functools.lru_cache(maxsize=256)
def run_within(function: Callable[..., Any], outer: Context, inner: Context) -> Within | None:
    """A function as one context has it, to be called in another.

    Args:
        function: What is called.
        outer: The context that it is called in.
        inner: The context that it runs in.

    Returns:
        None where that is no matter of single calls: autocast keeps the casts of weights to its
            end (``torch/amp/autocast_mode.py``), and what autograd shall record again was not.

    >>> outer = read_context()
    >>> with torch.no_grad():
    ...     double = run_within(torch.mul, outer, read_context())
    >>> double(torch.ones(1, requires_grad=True), 2)
    tensor([2.])
    """
    if inner.grad and not outer.grad:
        return None
    without = []
    for device, ours, theirs in zip(_DEVICES, inner.autocast, outer.autocast, strict=True):
        if ours is not None and ours != theirs:
            return None
        if ours != theirs:
            without.append(device)
    return Within(function, outer.grad and not inner.grad, tuple(without))
