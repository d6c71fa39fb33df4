"""CUDA as a target, and the GPU that it is on.

Fake tensors on a CUDA device abort the process where torch was built without CUDA. A tensor on
the GPU is therefore a fake tensor on the device ``cpu:0``, and one in the host's memory lies on
``cpu``: PyTorch holds the two for different devices, so they propagate, mix and refuse to mix as
on a machine with a GPU, and autograd formulas that ask a tensor for its device pass it on.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

from fxmem.fakes.fake_mode import find_inner
from fxmem.gpus import GpuModel
from fxmem.kernels.registry import ANY, Backend
from fxmem.patching import patch
from fxmem.versions import release
from fxmem.versions.operators import aten

GPU_DEVICE = torch.device("cpu", 0)
"""Device of the GPU's fake tensors; fake tensors of the host lie on ``torch.device("cpu")``."""

CUDA = Backend("cuda", ANY, GPU_DEVICE)
"""PyTorch's CUDA build; filled by the modules beside this one, which the package imports."""


_CUDNN_VERSIONS = {
    (2, 6): 90100,
    (2, 7): 90501,
    (2, 8): 91002,
    (2, 9): 91002,
    (2, 10): 91002,
    (2, 11): 91900,
}
"""The cuDNN that PyPI's wheels of a release require; 9.20.0 from 2.12 on."""


def _find_cudnn() -> int:
    cudnn: Any = torch.backends.cudnn
    if torch.version.cuda is not None and cudnn.is_available():
        return int(cudnn.version())
    return _CUDNN_VERSIONS.get(release.INSTALLED, 92000)


@dataclass(frozen=True, slots=True)
class Gpu:
    """Properties of a GPU that the choice of kernels depends on."""

    capability: tuple[int, int] = (8, 0)  # compute capability, major and minor
    # as ``torch.backends.cudnn.version()`` gives it
    cudnn_version: int = field(default_factory=_find_cudnn)
    # as in ``cudaDeviceProp.multiProcessorCount``; kernels size buffers by it
    multiprocessors: int = 108
    threads_per_multiprocessor: int = 2048  # as in ``cudaDeviceProp.maxThreadsPerMultiProcessor``
    attention: str | None = None  # the backend that is tried first; None for PyTorch's order
    model: GpuModel | None = field(default=None, compare=False)  # None for any such


_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
"""``maxThreadsPerMultiProcessor`` by compute capability, where it is not 2048."""


_SHARED_KIB = {(7, 0): 96, (7, 5): 64, (8, 6): 99, (8, 9): 99, (12, 0): 99}
"""``cudaDeviceProp.sharedMemPerBlockOptin`` by compute capability, where the family's is another:
48 before Volta, 163 for Ampere and 227 since Hopper."""


def measure_shared_memory(capability: tuple[int, int]) -> int:
    """Returns the bytes of shared memory that a kernel's block may ask for.

    >>> measure_shared_memory((8, 0)), measure_shared_memory((8, 9))
    (166912, 101376)
    """
    family = 48 if capability[0] < 7 else 163 if capability[0] == 8 else 227
    return _SHARED_KIB.get(capability, family) * 1024


def count_threads(capability: tuple[int, int]) -> int:
    """Returns the threads that a multiprocessor of that compute capability holds.

    >>> count_threads((8, 0)), count_threads((8, 9))
    (2048, 1536)
    """
    return _THREADS.get(capability, 2048)


def describe_gpu(model: GpuModel | None) -> Gpu:
    """Returns the properties of a kind of GPU; None for an A100.

    >>> describe_gpu(None) == Gpu()
    True
    """
    if model is None:
        return Gpu()
    return Gpu(
        capability=model.capability,
        multiprocessors=model.multiprocessors,
        threads_per_multiprocessor=count_threads(model.capability),
        model=model,
    )


class GpuState:
    """The GPU that steps are lowered for, and what runs on it.

    Attributes:
        gpu: Its properties.
        made_streams: How many streams were made, by the number of their pool.
        remarks: Why the node that runs takes a kernel that needs more memory than others.
        casts: Weights that autocast has cast, each beside a weak reference to the weight, by the
            address of its ``TensorImpl``, which the reference keeps.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.made_streams = Counter[int]()
        self.remarks: dict[str, None] = {}
        self.casts: dict[int, tuple[Any, torch.Tensor]] = {}
        self._thread = threading.local()

    @property
    def streams(self) -> list[int]:
        """The streams that this thread has entered and not left: the last is the current one."""
        entered: list[int] = vars(self._thread).setdefault("streams", [0])
        return entered


_current = ContextVar("gpu", default=GpuState(Gpu()))  # noqa: B039 - where nothing runs


def current_state() -> GpuState:
    """Returns the GPU that the step is lowered for, and what runs on it."""
    return _current.get()


def current_gpu() -> Gpu:
    """Returns the GPU that the step is lowered for."""
    return _current.get().gpu


def find_stream() -> int:
    """Finds the number of the current stream; 0 is the default one."""
    return _current.get().streams[-1]


@contextlib.contextmanager
def use_gpu(gpu: Gpu) -> Iterator[None]:
    """Lowers for this GPU within."""
    token = _current.set(GpuState(gpu))
    try:
        yield
    finally:
        _current.reset(token)


def is_on_gpu(tensor: object) -> bool:
    """Returns whether a fake tensor stands for one in the GPU's memory."""
    return isinstance(tensor, torch.Tensor) and find_inner(tensor).device == GPU_DEVICE


# -- what holds for every step --

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
def _update_together() -> contextlib.AbstractContextManager[None]:
    """Optimizers update all parameters together where all are plain tensors on a GPU.

    ``torch/optim/optimizer.py``, ``_default_to_fused_or_foreach``: by their exact type; as does
    ``torch.nn.utils.clip_grad_norm_``, by ``torch/utils/_foreach_utils.py``.
    """
    name, modules = "_foreach_supported_types", (optimizer, _foreach_utils)
    return patch({module: {name: [*vars(module)[name], FakeTensor]} for module in modules})
