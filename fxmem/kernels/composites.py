"""Workspaces of operators whose kernels are composites of other operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from fxmem.fakes.fake_mode import LeanDispatchMode
from fxmem.graph import measure_blocks
from fxmem.kernels.registry import Backend, OperatorCall


class _Meter(LeanDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what operators allocate, as long as something refers to it."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._backend, self._kernels = backend, backend.kernels
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {_find_key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        self._live = {key: kept for key, kept in self._live.items() if not kept[0].expired()}  # type: ignore[no-untyped-call]
        kernel = self._kernels.get(func)
        result = NotImplemented if kernel is None else kernel(*args, **kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and _find_key(x) not in given:
                storage = x.untyped_storage()
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._live[storage._cdata] = reference, storage.nbytes()
        found = self._backend.estimate_workspace(func, OperatorCall(args, kwargs, result))
        inside = found if isinstance(found, int) else measure_blocks(found, ())
        self.peak_bytes = max(self.peak_bytes, sum(n for _, n in self._live.values()) + inside)
        return result


def _find_key(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def measure_composite(backend: Backend, composite: Callable[..., Any], call: OperatorCall) -> int:
    """Measures what a kernel takes beside its results, by running it on tensors without memory.

    Args:
        backend: Whose kernel it is.
        composite: Does what the kernel does.
        call: The operator's call; one tensor that is given twice stays one.
    """
    shapes: dict[int, Tensor] = {}

    def imitate(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in shapes:
            shapes[id(x)] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return shapes[id(x)]

    with _disable_current_modes(), torch.no_grad(), torch._C.DisableTorchFunction():
        args = [imitate(x) for x in call.args]
        with _Meter(backend) as meter:
            composite(*args)
    peak_bytes: int = meter.peak_bytes
    return max(0, peak_bytes - call.result_bytes)
