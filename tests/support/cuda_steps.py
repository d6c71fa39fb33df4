"""Functions of tensors in a step that is lowered for CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from running import Call
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.kernel_workspace import estimate_workspace_bytes
from fxmem import analyze
from fxmem.fakes.devices import translate_devices
from fxmem.fakes.fake_mode import make_fake_mode
from fxmem.graph import MemoryGraph, Phase
from fxmem.kernels.cuda import CUDA
from fxmem.kernels.cuda.gpu import GPU_DEVICE
from fxmem.kernels.functions import lower_functions
from fxmem.versions.operators import find_operators

Saved = tuple[tuple[int, ...], str]
"""Shape and dtype."""


class Watch(TorchDispatchMode):
    """Lists what a function returns for each operator, its arguments and its result."""

    def __init__(self, describe: Callable[[Any, Any, Any, Any], Any]) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self._describe = describe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = self._describe(func, args, kwargs or {}, result)
        self.calls += [] if found is None else [found]
        return result


def run_step(function: Callable[..., Any], *inputs: Tensor, mode: str = "train") -> MemoryGraph:
    """The memory graph of a step whose model is a module, or calls a function."""
    model = function if isinstance(function, nn.Module) else Call(function)
    return analyze(model, inputs, device="cuda", mode=mode).graph


def saved(graph: MemoryGraph) -> list[Saved]:
    """Lists the saved storages that the step made itself, in order of allocation."""
    return [
        (storage.shape, storage.dtype)
        for storage in graph.storages
        if storage.saved_by and storage.born >= 0
    ]


def made(graph: MemoryGraph, *phases: Phase) -> list[tuple[str, int]]:
    """The operators that allocate, and what: results and buffers, in the forward pass."""
    found = []
    for operation in graph.operations:
        if operation.phase not in (phases or (Phase.FORWARD,)):
            continue
        sizes = [s.nbytes for s in graph.storages if s.born == operation.index]
        if operation.workspace_bytes or sizes:
            name = operation.name.removeprefix("aten.").split(".")[0]
            found.append((name, sum(sizes) + operation.workspace_bytes))
    return found


def hold(graph: MemoryGraph, phase: Phase) -> int:
    """The most that a phase holds of what it made itself, in bytes."""
    steps = [o for o in graph.operations if o.phase is phase]
    first = steps[0].index if steps else 0
    made = [s for s in graph.storages if s.born >= first]
    held = (
        operation.workspace_bytes
        + sum(
            s.nbytes
            for s in made
            if s.born <= operation.index and (s.died is None or s.died >= operation.index)
        )
        for operation in steps
    )
    return max(held, default=0)


def workspaces(graph: MemoryGraph) -> dict[str, int]:
    """Bytes of buffers by operator, where there are any."""
    return {o.name: o.workspace_bytes for o in graph.operations if o.workspace_bytes}


@contextlib.contextmanager
def on_gpu() -> Iterator[None]:
    """Makes fake tensors of the GPU."""
    with make_fake_mode(), torch.device(GPU_DEVICE):
        yield


@contextlib.contextmanager
def lower_for_cuda() -> Iterator[None]:
    """Runs code on fake tensors as a step for CUDA does."""
    with translate_devices(GPU_DEVICE), lower_functions(CUDA):
        yield


def run_kernel(func: OpOverload, *args: Any, **kwargs: Any) -> tuple[Any, int]:
    """An operator's fake results on the GPU, and its kernel's buffers; see :func:`on_gpu`."""
    kernel = CUDA.kernels.get(func)
    result = kernel(*args, **kwargs) if kernel else NotImplemented
    if result is NotImplemented:
        result = func(*args, **kwargs)
    return result, estimate_workspace_bytes(CUDA, func, args, kwargs, result)


def estimate(func: OpOverload, *args: Any, **kwargs: Any) -> int:
    """Bytes of an operator's buffers on the GPU; see :func:`on_gpu`."""
    return run_kernel(func, *args, **kwargs)[1]


Buffers = tuple[str, Callable[[], tuple[Any, ...]], int]
"""An operator, what makes its arguments, and the bytes of its buffers."""


def check_buffers(operator: str, make: Callable[[], tuple[Any, ...]], expected: int) -> None:
    """Holds an operator's buffers, for arguments that are made on the GPU, to a number of bytes."""
    (func,) = find_operators(operator)
    with on_gpu():
        assert estimate(func, *make()) == expected


def make_buffers_test(cases: list[Buffers]) -> Callable[[Buffers], None]:
    """Makes a test of such cases, to be called ``test_...`` in a module."""

    @pytest.mark.parametrize("case", cases, ids=[name for name, _, _ in cases])
    def test(case: Buffers) -> None:
        check_buffers(*case)

    return test
