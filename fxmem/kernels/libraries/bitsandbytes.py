"""bitsandbytes, whose operators are Python that allocates and launches compiled kernels.

Source: ``bitsandbytes/backends/cuda/ops.py`` and ``cpu/ops.py``, 0.50. That Python runs as it is,
with launches that do nothing. The package is imported as on a machine without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from fxmem.errors import TraceError
from fxmem.kernels.cuda.gpu import CUDA
from fxmem.kernels.registry import CPU, Backend
from fxmem.kernels.stand_ins import tell
from fxmem.patching import change_items, patch
from fxmem.tracing.compiled import patch_when_imported
from fxmem.units import format_bytes

_NAME = "bitsandbytes"
_TABLES = ("str2optimizer32bit", "str2optimizer8bit_blockwise")
"""Of compiled functions, by optimizer and dtype."""
_CACHE: Any = functools._lru_cache_wrapper


class _Library:
    """Stands for the compiled library."""

    def __getattr__(self, name: str) -> Any:
        return _launch


def _launch(*_arguments: Any) -> None:
    pass


class _Pages:
    """Stands for ``functional.get_paged``: tensors of the host to PyTorch, in managed memory."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._note = ""

    def __call__(
        self, *shape: int, dtype: torch.dtype = torch.float32, device: Any = None
    ) -> Tensor:
        mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        with no_dispatch():
            meta = torch.empty(shape, dtype=dtype, device="meta")
            made: Any = FakeTensor(mode, meta, torch.device("cpu"))
        made.is_paged, made.page_deviceid = True, 0
        self._nbytes += meta.nbytes
        note = (
            f"{format_bytes(self._nbytes)} of paged optimizer states are in managed memory and not"
            " counted: they are on the GPU as long as there is room, then on the host."
        )
        tell(note, instead_of=self._note)
        self._note = note
        return made  # type: ignore[no-any-return]


@contextlib.contextmanager
def _run_python(target: Backend, package: ModuleType) -> Iterator[None]:
    """Runs the operators' own Python within, on the target's fakes."""
    # Where there is a GPU, the package has imported its operators for CUDA itself.
    kernels: Any = importlib.import_module(f"{_NAME}.backends.{target.name}.ops")
    functional: Any = importlib.import_module(f"{_NAME}.functional")
    library = {"lib": _Library()}
    pointer = {"data_ptr": lambda _tensor: 0, "__bool__": lambda _tensor: False}  # no outliers
    own: dict[str, Any] = dict(library)
    paging: dict[str, Any] = {}
    if target is CUDA:
        own["_get_raw_stream"] = lambda _device: 0
        if not {*_TABLES} <= vars(kernels).keys():
            raise TraceError(
                f"bitsandbytes {package.__version__} has optimizers that are no operators",
                hint="pip install 'bitsandbytes>=0.48'",
            )
        for name in _TABLES:
            table = vars(kernels)[name]
            own[name] = {key: [_launch] * len(table[key]) for key in table}
        paging = {"get_paged": _Pages(), "prefetch_tensor": _launch, "fill": _launch}
    launches: dict[Any, Any] = {kernels: own, functional: library, Tensor: pointer}
    caches = [value for value in vars(kernels).values() if isinstance(value, _CACHE)]
    with contextlib.ExitStack() as stack:
        running = {_NAME: lambda: patch(launches)}
        stack.enter_context(change_items(target.python_kernels, running))
        stack.enter_context(patch({functional: paging}))
        for cache in caches:  # of the GPU's properties
            cache.cache_clear()
            stack.callback(cache.cache_clear)
        stack.enter_context(change_items(functional.name2qmap))
        functional.name2qmap.clear()  # of tables, as in a new process
        yield


for _target in (CPU, CUDA):
    _target.context(
        functools.partial(patch_when_imported, _NAME, functools.partial(_run_python, _target))
    )
