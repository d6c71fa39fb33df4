"""The same step on real CPU tensors and on lowered fakes, operator by operator."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fxmem.fakes.swapping import swap_in_fakes
from fxmem.kernels.cpu import CPU
from fxmem.kernels.functions import lower_functions

_UNSEEN = (torch.ops.prim.device.default, torch.ops.aten.detach.default)


@dataclass
class Trace:
    """The record of one step.

    Attributes:
        operators: Names, in order.
        results: Shapes, types and bytes of the storages of each operator's results.
        saved: Shapes, types and storages' bytes of what autograd saved.
        peak_bytes: Of storages that operators made.
    """

    operators: list[str] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    saved: list[Any] = field(default_factory=list)
    peak_bytes: int = 0


def describe(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, type and bytes of the storage."""
    return tuple(tensor.shape), tensor.dtype, tensor.untyped_storage().nbytes()


class Watch(TorchDispatchMode):
    """Fills a trace."""

    def __init__(self, kernels: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.trace = Trace()
        self._kernels = kernels
        self._live: dict[int, Any] = {}
        self._live_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves(args):
            if isinstance(leaf, Tensor):  # what no operator made is not counted
                self._count(leaf.untyped_storage(), counts=False)
        result = self._kernels.get(func, func)(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.numel()]
        if func not in _UNSEEN:
            self.trace.operators.append(str(func))
            self.trace.results.append((str(func), [describe(tensor) for tensor in tensors]))
        for tensor in tensors:
            self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any, counts: bool = True) -> None:
        key, nbytes = storage._cdata, storage.nbytes() if counts else 0
        if key in self._live:
            return

        def forget(_: Any) -> None:
            del self._live[key]
            self._live_bytes -= nbytes

        self._live[key] = weakref.ref(storage, forget)
        self._live_bytes += nbytes
        self.trace.peak_bytes = max(self.trace.peak_bytes, self._live_bytes)


@contextlib.contextmanager
def _watch_saved(trace: Trace) -> Iterator[None]:
    def pack(tensor: Tensor) -> Tensor:
        trace.saved.append(describe(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _run(model: nn.Module, args: tuple[Any, ...], mode: str, watch: Watch) -> Trace:
    model.train(mode == "train")
    with watch:
        if mode == "infer":
            with torch.no_grad():
                model(*args)
            return watch.trace
        with _watch_saved(watch.trace):
            output = model(*args)
            loss = sum(x.sum() for x in tree_leaves(output) if isinstance(x, Tensor))
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.backward()
    return watch.trace


def run_fake(model: nn.Module, *args: Any, mode: str = "train") -> Trace:
    """The trace of a step on lowered fakes."""
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = tree_map_only(Tensor, lambda x: fake_mode.from_tensor(x, static_shapes=True), args)
    with (
        fake_mode,
        lower_functions(CPU),
        swap_in_fakes(model, fake_mode, train=mode == "train"),
    ):
        return _run(model, fakes, mode, Watch(CPU.kernels))


def run_real(model: nn.Module, *args: Any, mode: str = "train") -> Trace:
    """The trace of a step on real tensors."""
    return _run(model, args, mode, Watch({}))


def compare(model: nn.Module, *args: Any, mode: str = "train") -> list[str]:
    """Asserts that a step is the same on real tensors, watched likewise, and on lowered fakes.

    Returns:
        The names of the operators.
    """
    fake = run_fake(model, *args, mode=mode)
    real = run_real(model, *args, mode=mode)
    assert fake.results == real.results
    assert fake.saved == real.saved
    assert fake.peak_bytes == real.peak_bytes
    return fake.operators
