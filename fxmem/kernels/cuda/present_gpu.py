"""A machine with one GPU, as far as a script can see.

``torch.cuda`` answers as on the target GPU, waits for nothing and keeps no states but the current
stream. What the script puts on ``cuda`` is for the recorder.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fxmem.errors import TraceError
from fxmem.gpus import CONTEXT_BYTES, find_gpu
from fxmem.kernels.cuda.gpu import Gpu, measure_shared_memory
from fxmem.tracing.source import find_source
from fxmem.versions import release

_ANY_GPU = "a100-80gb"
_RNG_STATE_BYTES = 16
"""A seed and an offset: ``CUDAGeneratorImpl::get_state`` in ATen/cuda/CUDAGeneratorImpl.cpp."""
_STREAMS_OF_POOL, _STREAM_POOLS = 32, 4


class _Queue:
    """A stream or an event: what runs on it runs at once."""

    device = torch.device("cuda", 0)

    def _pass(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    record = wait = synchronize = wait_stream = wait_event = _pass

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False


class _Event(_Queue):
    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def elapsed_time(self, _end: Any) -> float:
        return 1.0


class _Stream(_Queue):
    """A stream, which the allocator knows by its number.

    As in ``c10/cuda/CUDAStream.cpp``, those of one priority come in turn from a pool.
    """

    _made: ClassVar[Counter[int]] = Counter()  # by priority

    def __init__(
        self, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **_kwargs: Any
    ) -> None:
        self.priority = priority
        if stream_id is None:
            pool = min(max(-priority, 0), _STREAM_POOLS - 1)
            stream_id = 1 + pool * _STREAMS_OF_POOL + self._made[pool] % _STREAMS_OF_POOL
            self._made[pool] += 1
        self.stream_id = self.cuda_stream = stream_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and self.stream_id == other.stream_id

    def __hash__(self) -> int:
        return self.stream_id

    def __enter__(self) -> _Stream:
        _thread.entered.append(self)
        return self

    def __exit__(self, *_error: object) -> None:
        _thread.entered.pop()

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _ExternalStream(_Stream):
    def __init__(self, stream_ptr: int, *_: Any, **__: Any) -> None:
        super().__init__(stream_id=stream_ptr)


class _Thread(threading.local):
    """The streams that a thread has entered and not left; the last is the current one."""

    def __init__(self) -> None:
        self.entered = [_Stream(stream_id=0)]


_thread = _Thread()


def find_stream() -> int:
    """Finds the number of the current stream, within :func:`show_gpu`; 0 is the default one."""
    return _thread.entered[-1].stream_id


def _set_stream(stream: _Stream | None) -> None:
    if stream is not None:
        _thread.entered[-1] = stream


def _make_generator(device: Any = "cpu") -> torch.Generator:
    """Makes a generator of the host's, which fakes of the GPU draw from as well."""
    return _Generator("cpu")


_Generator = torch.Generator


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


def _set_default_type(kind: Any, stack: contextlib.ExitStack) -> None:
    found = find_type(kind)
    torch.set_default_dtype(found.dtype)
    torch.set_default_device("cuda" if found.is_cuda else None)
    if found.is_cuda:
        importlib.import_module("torch._dynamo")  # which checks the signature of Tensor.__new__
        stack.enter_context(mock.patch.object(Tensor, "__new__", staticmethod(_make_on_gpu)))


def _make_on_gpu(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes what ``torch.Tensor(...)`` does; a default device alone leaves that on the host."""
    made = _new(cls, *args, **kwargs)
    return made.cuda() if cls is Tensor else made


_new: Any = Tensor.__new__


def describe_properties(gpu: Gpu) -> SimpleNamespace:
    """Describes a GPU as ``torch.cuda.get_device_properties`` does, by default an A100."""
    model = gpu.model or find_gpu(_ANY_GPU)
    return SimpleNamespace(
        name=model.name,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        total_memory=model.capacity_bytes,
        multi_processor_count=gpu.multiprocessors,
        max_threads_per_multi_processor=gpu.threads_per_multiprocessor,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=measure_shared_memory(gpu.capability),
        shared_memory_per_multiprocessor=measure_shared_memory(gpu.capability) + 1024,
        warp_size=32,
        uuid=uuid.UUID(int=0),
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
        is_integrated=False,
        is_multi_gpu_board=False,
        gcnArchName="",
    )


@contextlib.contextmanager
def show_gpu(
    gpu: Gpu,
    memory: Mapping[str, Callable[..., Any]] | None = None,
    *,
    count: Callable[[], int] = lambda: 1,
) -> Iterator[None]:
    """Has ``torch.cuda`` tell of one GPU within.

    Args:
        gpu: The GPU.
        memory: Functions of ``torch.cuda.memory`` that read the allocator, reset its counters and
            empty its cache; None where nothing is allocated.
        count: Counts such GPUs; all memory is on the first.
    """
    properties = describe_properties(gpu)
    state = torch.zeros(_RNG_STATE_BYTES, dtype=torch.uint8)

    def answer(value: Any) -> Callable[..., Any]:
        return lambda *_args, **_kwargs: value

    def measure_free(*_args: Any, **_kwargs: Any) -> tuple[int, int]:
        used = torch.cuda.memory_reserved() + CONTEXT_BYTES[1]
        return max(properties.total_memory - used, 0), properties.total_memory

    def summarize(*_args: Any, **_kwargs: Any) -> str:
        return "\n".join(f"{key} {value}" for key, value in torch.cuda.memory_stats().items())

    stack = contextlib.ExitStack()
    major, minor = gpu.capability
    answers: dict[str, Any] = {
        **dict.fromkeys(_TRUE, True),
        **dict.fromkeys(_FALSE, False),
        **dict.fromkeys(_ZERO, 0),
        **dict.fromkeys(_IGNORED, None),
        "get_device_name": properties.name,
        "get_device_capability": gpu.capability,
        "get_device_properties": properties,
        "get_arch_list": [f"sm_{major}{minor}"],
        "current_accelerator": torch.device("cuda"),
    }
    functions: dict[str, Any] = {
        **{name: answer(value) for name, value in answers.items()},
        "device_count": count,
        **dict.fromkeys(("mem_get_info", "get_memory_info"), measure_free),
        "memory_stats_as_nested_dict": lambda *_, **__: {},
        "memory_summary": summarize,
        **{name: getattr(torch.cuda, name) for name in _READERS},
        **(memory or {}),
        "get_rng_state": lambda *_, **__: state.clone(),
        "get_rng_state_all": lambda: [state.clone()],
        "Stream": _Stream,
        "Event": _Event,
        "CUDAGraph": _Graph,
        "ExternalStream": _ExternalStream,
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "set_stream": _set_stream,
        "current_stream": lambda *_, **__: _thread.entered[-1],
        "default_stream": lambda *_, **__: _Stream(stream_id=0),
        **{f"{kind}Tensor": TypeOnGpu(getattr(torch, f"{kind}Tensor")) for kind in _KINDS},
    }
    owners: dict[Any, dict[str, Any]] = {
        torch.cuda: functions,
        torch.cuda.nccl: {"version": answer(_NCCL_VERSION)},
        torch.distributed: {"is_nccl_available": answer(True)},
        torch.cuda.nvtx: {"range_push": answer(0), "range_pop": answer(0)},
        torch.cuda.memory: functions,
        torch.accelerator: functions,
        torch._C: {
            "_get_accelerator": answer(torch.device("cuda")),  # which fully_shard asks
            "_cuda_getCurrentRawStream": lambda _device=0: find_stream(),
            "_cuda_isInBadFork": answer(False),
            "_cuda_clearCublasWorkspaces": answer(None),
            "_accelerator_exchangeDevice": answer(0),  # DistributedDataParallel moves inputs so
            "_accelerator_maybeExchangeDevice": answer(0),
        },
        torch: {
            "Generator": _GeneratorOfAnyDevice,
            "Stream": _Stream,
            "Event": _Event,
            "set_default_tensor_type": lambda kind: _set_default_type(kind, stack),
        },
        torch.version: {} if torch.version.cuda else {"cuda": _find_cuda()},
        torch.backends.cudnn: {"version": answer(gpu.cudnn_version)},
        Tensor: {"record_stream": answer(None)},
        nn.DataParallel: {"scatter": _scatter_to_one},
    }
    with stack:
        for owner, names in owners.items():
            for name, value in names.items():  # builds for the CPU alone lack some of torch._C
                if hasattr(owner, name) or name.startswith("_cuda_"):
                    patch = mock.patch.object(owner, name, value, create=True)
                    stack.enter_context(patch)
        stack.enter_context(mock.patch.multiple(_thread, entered=[_Stream(stream_id=0)]))
        stack.enter_context(mock.patch.multiple(_Stream, _made=Counter()))
        yield


_CUDA_VERSIONS = {(2, 6): "12.4", (2, 7): "12.6", (2, 8): "12.8", (2, 9): "12.8", (2, 10): "12.8"}
"""The CUDA that PyPI's wheels of a release are built with; 13.0 from 2.11 on."""


_NCCL_VERSION = (2, 27, 5)
"""Of the wheels of 2.9; code asks only whether it knows bfloat16, from 2.10 on (torchtune)."""


def _find_cuda() -> str:
    return _CUDA_VERSIONS.get(release.INSTALLED, "13.0")


_KINDS = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_TRUE = ("is_available", "is_initialized", "is_bf16_supported")
_FALSE = ("_is_in_bad_fork", "is_current_stream_capturing")
_ZERO = (
    "current_device",
    "current_device_index",
    "_exchange_device",
    "_maybe_exchange_device",
    "initial_seed",
)
_IGNORED = (
    "init",
    "_lazy_init",
    "synchronize",
    "set_device",
    "set_device_index",
    "empty_cache",
    "_record_memory_history",
    "_dump_snapshot",
    "ipc_collect",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
    "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
    "set_per_process_memory_fraction",
)
"""Functions that do something on the GPU and answer nothing."""
_READERS = (
    "memory_stats",
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
)
"""PyTorch's own functions that look a counter up, for ``torch.accelerator`` as well."""


class _Graph:
    """A class, which transformers names in annotations."""

    def __init__(self, *_: Any, **__: Any) -> None:
        source = find_source()
        raise TraceError(
            f"CUDA graphs{f' at {source}' if source else ''} are not modelled",
            hint="run without torch.cuda.graph and make_graphed_callables: graphs keep a pool of"
            " their own",
        )


class _OfAnyDevice(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Generator)

    def __call__(cls, device: Any = "cpu") -> Any:
        return _make_generator(device)


class _GeneratorOfAnyDevice(metaclass=_OfAnyDevice):
    """``torch.Generator``, which needs no GPU for one."""


def _scatter_to_one(
    module: Any, inputs: Any, kwargs: Any, _device_ids: object
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Scatters to the only GPU, as ``torch/nn/parallel/scatter_gather.py`` does."""
    moved = tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), (inputs, kwargs))
    return (moved[0],), (moved[1] or {},)
