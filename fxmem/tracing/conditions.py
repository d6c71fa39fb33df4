"""Conditions that a traced graph is specialised on: the context of its call and its arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fxmem.errors import UsageError
from fxmem.specs import TensorSpec, strip_torch
from fxmem.versions.fallbacks import find_saving_hooks

SIGNATURE = "fxmem_signature"
"""Key of a placeholder's ``meta``: the :class:`Signature` of the argument."""
CONTEXT = "fxmem_context"
"""Key of the output's ``meta``: the :class:`TraceContext`."""
PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)
"""Types of arguments that are compared by value."""
_DEVICES = ("cpu", "cuda")

Autocast = tuple[torch.dtype | None, ...]
"""By device, the dtype that code is autocast to; None where it is not."""
Tie = tuple[int, int]
"""The position of a tensor among others, and that of the same one before it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """The context that code runs in: whether autograd records, and autocast by device."""

    grad: bool
    autocast: Autocast


def read_context() -> Context:
    """Reads the context of the caller."""
    return Context(torch.is_grad_enabled(), read_autocast())


def read_autocast() -> Autocast:
    """Reads what the caller's code is autocast to."""
    return tuple([read_autocast_on(device) for device in _DEVICES])


def read_autocast_on(device: str) -> torch.dtype | None:
    """Reads what the caller's code is autocast to on a device; None for nothing."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


@contextlib.contextmanager
def leave_autocast() -> Iterator[None]:
    """Leaves all autocast that the caller is in: one that is entered within is the outermost.

    The outermost one frees what was cast when it ends (``torch/amp/autocast_mode.py``). On exit
    all is as it was, after an error in which an autocast was entered and not left, too.
    """
    before = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES}
    caches, depth = torch.is_autocast_cache_enabled(), _nest_autocast(0)
    try:
        for device in _DEVICES:
            torch.set_autocast_enabled(device, False)
        yield
    finally:
        for device, (is_enabled, dtype) in before.items():
            torch.set_autocast_enabled(device, is_enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(caches)
        _nest_autocast(depth)


def _nest_autocast(depth: int) -> int:
    """Sets how many autocasts there are around the caller; returns how many there were."""
    before = torch.autocast_increment_nesting() - 1
    for _ in range(before + 1 - depth):
        torch.autocast_decrement_nesting()
    for _ in range(depth - before - 1):
        torch.autocast_increment_nesting()
    return before


def read_settings() -> dict[str, tuple[Any, ...]]:
    """Reads what else code sets around its calls, which no call of a graph can set."""
    read: Any = torch._C
    return {
        "which kernels run": (  # torch.nn.attention.sdpa_kernel, torch.backends
            read._get_flash_sdp_enabled(),
            read._get_mem_efficient_sdp_enabled(),
            read._get_math_sdp_enabled(),
            read._get_cudnn_sdp_enabled(),
            read._get_cudnn_enabled(),
            read._get_deterministic_algorithms(),
            # Once code has set the newer name, as TrainingArguments(tf32=True), the older raises.
            getattr(torch.backends.cuda.matmul, "fp32_precision", None)
            or read._get_float32_matmul_precision(),
        ),
        "what autograd does with what it saves": find_saving_hooks(),
    }


class Within:
    """A function that runs without gradients, without autocast on some devices, or both."""

    def __init__(
        self, function: Callable[..., Any], without_grad: bool, without_autocast: tuple[str, ...]
    ) -> None:
        self._function, self._devices = function, without_autocast
        self._without_grad = without_grad
        # As torch.fx wants to know them of what a node calls.
        self.__name__ = self.__qualname__ = f"run_{function.__name__}"
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        with contextlib.ExitStack() as stack:
            if self._without_grad:
                stack.enter_context(torch.no_grad())
            for device in self._devices:
                stack.enter_context(torch.autocast(device, enabled=False))
            return self._function(*args, **kwargs)


@functools.lru_cache(maxsize=256)
def run_within(function: Callable[..., Any], outer: Context, inner: Context) -> Within | None:
    """Makes a function that runs as the inner context has it, to be called in the outer one.

    Returns None where single calls cannot be so: autocast keeps the casts of weights to its end
    (``torch/amp/autocast_mode.py``), and autograd cannot record what it did not.
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


class Signature(NamedTuple):
    """The signature of an argument, tensors' values aside."""

    structure: Hashable  # types, plain values, and tensors' ranks, dtypes and ``requires_grad``
    sizes: tuple[tuple[int, ...], ...]  # of each tensor


class TraceContext(NamedTuple):
    """The call that a graph was traced in, and the model's modes."""

    autocast: Autocast
    ties: tuple[Tie, ...]  # tensors that were given twice: the graph may take either
    training: frozenset[str]  # names of the modules that were in train mode
    frozen: frozenset[str]  # names of the parameters that wanted no gradient
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None  # as :func:`make_specs` makes them


def describe_value(value: Any) -> Signature:
    """Describes an argument; equal for those that differ in tensors' values only."""
    tensors: list[Tensor] = []
    structure = describe_structure(value, tensors)
    return Signature(structure, tuple(tuple(map(int, tensor.shape)) for tensor in tensors))


def describe_structure(value: Any, tensors: list[Tensor]) -> Hashable:
    """Describes an argument without the sizes of its tensors, which are added to a list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.dim(), value.dtype, value.requires_grad
    if isinstance(value, PLAIN_TYPES):
        return type(value), value or repr(value)  # 0.0 and -0.0 differ
    held: list[Any]
    if isinstance(value, (list, tuple)):
        held = [*value]
    elif isinstance(value, Mapping):
        held = [*value, *value.values()]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif isinstance(value, slice):
        held = [value.start, value.stop, value.step]
    else:
        return type(value), value if isinstance(value, Hashable) else id(value)
    return (type(value), *[describe_structure(element, tensors) for element in held])


def make_specs(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Puts a :class:`TensorSpec` in the place of each tensor, one for all places of a tensor.

    Returns None where a tensor's dtype has no spec, or an object is no plain value.
    """
    leaves, structure = tree_flatten((tuple(args), dict(kwargs)))
    made: dict[int, TensorSpec] = {}
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            shape = tuple(map(int, leaf.shape))
            try:
                spec = TensorSpec(shape, strip_torch(leaf.dtype), leaf.requires_grad)
            except UsageError:
                return None
            leaves[at] = made.setdefault(id(leaf), spec)
        elif not isinstance(leaf, PLAIN_TYPES):
            return None
    given: Any = tree_unflatten(leaves, structure)
    return given  # type: ignore[no-any-return]
