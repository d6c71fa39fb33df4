"""A machine with one GPU, as far as code can see.

``torch.cuda`` answers as on the target GPU, waits for nothing and keeps no states but the current
stream. Tensors that the code puts on ``cuda`` are for :mod:`fxmem.fakes.devices`.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fxmem.errors import TraceError
from fxmem.fakes.devices import TypeOnGpu, find_type
from fxmem.gpus import CONTEXT_BYTES, find_gpu
from fxmem.kernels.cuda.gpu import (
    Gpu,
    current_state,
    find_stream,
    measure_shared_memory,
    use_gpu,
)
from fxmem.patching import patch
from fxmem.source import find_source
from fxmem.versions import release

_ANY_GPU = "a100-80gb"
_RNG_STATE_BYTES = 16
"""A seed and an offset: ``CUDAGeneratorImpl::get_state`` in ATen/cuda/CUDAGeneratorImpl.cpp."""
_STREAMS_OF_POOL, _STREAM_POOLS = 32, 4


class _Queue:
    """A stream or an event: what runs on it runs at once."""

    device = torch.device("cuda", 0)
    device_index, device_type = 0, 1  # c10::DeviceType::CUDA

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

    As in ``c10/cuda/CUDAStream.cpp``, streams of one priority come in turn from a pool.
    """

    def __init__(
        self, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **_kwargs: Any
    ) -> None:
        self.priority = priority
        if stream_id is None:
            pool = min(max(-priority, 0), _STREAM_POOLS - 1)
            made = current_state().made_streams
            stream_id = 1 + pool * _STREAMS_OF_POOL + made[pool] % _STREAMS_OF_POOL
            made[pool] += 1
        self.stream_id = self.cuda_stream = stream_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and self.stream_id == other.stream_id

    def __hash__(self) -> int:
        return self.stream_id

    def __enter__(self) -> _Stream:
        current_state().streams.append(self.stream_id)
        return self

    def __exit__(self, *_error: object) -> None:
        current_state().streams.pop()

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _ExternalStream(_Stream):
    def __init__(self, stream_ptr: int, *_: Any, **__: Any) -> None:
        super().__init__(stream_id=stream_ptr)


def _set_stream(stream: _Stream | None) -> None:
    if stream is not None:
        current_state().streams[-1] = stream.stream_id


def _make_generator(device: Any = "cpu") -> torch.Generator:
    """Makes a generator of the host's, which fakes of the GPU draw from as well."""
    return _Generator("cpu")


_Generator = torch.Generator


def _set_default_type(kind: Any, stack: contextlib.ExitStack) -> None:
    found = find_type(kind)
    torch.set_default_dtype(found.dtype)
    torch.set_default_device("cuda" if found.is_cuda else None)
    if found.is_cuda:
        importlib.import_module("torch._dynamo")  # which checks the signature of Tensor.__new__
        stack.enter_context(patch({Tensor: {"__new__": staticmethod(_make_on_gpu)}}))


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
    """Lowers for a GPU within, and shows that GPU in ``torch.cuda``.

    Args:
        gpu: The GPU.
        memory: Functions of ``torch.cuda.memory`` that read the allocator, reset its counters and
            empty its cache; None where nothing is allocated.
        count: Counts such GPUs; all memory is on the first.
    """
    functions = {
        **_list_answers(gpu),
        "device_count": count,
        **_list_counters(describe_properties(gpu).total_memory),
        **(memory or {}),
        **_list_streams(),
        **{f"{kind}Tensor": TypeOnGpu(getattr(torch, f"{kind}Tensor")) for kind in _KINDS},
    }
    with contextlib.ExitStack() as stack:
        owners: dict[Any, dict[str, Any]] = {
            torch.cuda: functions,
            torch.cuda.memory: functions,
            torch.cuda.random: functions,
            torch.cuda.streams: functions,
            torch.accelerator: functions,
            torch: {
                "Generator": _GeneratorOfAnyDevice,
                "Stream": _Stream,
                "Event": _Event,
                "set_default_tensor_type": lambda kind: _set_default_type(kind, stack),
            },
            **_list_others(gpu),
        }
        there = {  # builds for the CPU alone lack some of torch._C
            owner: {
                name: value
                for name, value in names.items()
                if hasattr(owner, name) or name.startswith("_cuda_")
            }
            for owner, names in owners.items()
        }
        stack.enter_context(use_gpu(gpu))
        stack.callback(_forget_answers)
        stack.enter_context(patch(there))
        _forget_answers()
        yield


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: value


def _list_answers(gpu: Gpu) -> dict[str, Any]:
    """Lists the functions that give one answer, by name."""
    properties = describe_properties(gpu)
    major, minor = gpu.capability
    state = torch.zeros(_RNG_STATE_BYTES, dtype=torch.uint8, device="cpu")
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
        "get_rng_state": state,
        "get_rng_state_all": [state],
    }
    return {
        **{name: _answer(value) for name, value in answers.items()},
        "is_bf16_supported": lambda including_emulation=True: including_emulation or major >= 8,
    }


def _list_counters(total_memory: int) -> dict[str, Any]:
    """Lists the functions that read the allocator's counters, by name."""

    def measure_free(*_args: Any, **_kwargs: Any) -> tuple[int, int]:
        used = torch.cuda.memory_reserved() + CONTEXT_BYTES[1]
        return max(total_memory - used, 0), total_memory

    def summarize(*_args: Any, **_kwargs: Any) -> str:
        return "\n".join(f"{key} {value}" for key, value in torch.cuda.memory_stats().items())

    return {
        **dict.fromkeys(("mem_get_info", "get_memory_info"), measure_free),
        "memory_stats_as_nested_dict": lambda *_, **__: {},
        "memory_summary": summarize,
        **{name: getattr(torch.cuda, name) for name in _READERS},
    }


def _list_streams() -> dict[str, Any]:
    """Lists streams and events, and the functions that make and enter them, by name."""
    return {
        "Stream": _Stream,
        "Event": _Event,
        "CUDAGraph": _Graph,
        "ExternalStream": _ExternalStream,
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "set_stream": _set_stream,
        "current_stream": lambda *_, **__: _Stream(stream_id=find_stream()),
        "default_stream": lambda *_, **__: _Stream(stream_id=0),
    }


def _list_others(gpu: Gpu) -> dict[Any, dict[str, Any]]:
    """Lists replacements outside of ``torch.cuda`` and ``torch.accelerator``, by owner."""
    return {
        torch._C: {
            "_get_accelerator": _answer(torch.device("cuda")),  # which fully_shard asks
            "_cuda_getCurrentRawStream": lambda _device=0: find_stream(),
            "_cuda_isInBadFork": _answer(False),
            "_is_flash_attention_available": _answer(True),  # which xformers asks
            "_cuda_clearCublasWorkspaces": _answer(None),
            "_accelerator_exchangeDevice": _answer(0),  # DistributedDataParallel moves inputs so
            "_accelerator_maybeExchangeDevice": _answer(0),
        },
        torch.version: {} if torch.version.cuda else {"cuda": _find_cuda()},
        torch.backends.cudnn: {"version": _answer(gpu.cudnn_version)},
        torch.cuda.nccl: {"version": _answer(_NCCL_VERSION)},
        torch.cuda.nvtx: {"range_push": _answer(0), "range_pop": _answer(0)},
        # Where there is none, autocast stays off: for good, where it decorates a function.
        torch.cuda.amp.common: {"amp_definitely_not_available": _answer(False)},
        torch.distributed: {"is_nccl_available": _answer(True)},
        Tensor: {"record_stream": _answer(None)},
        nn.DataParallel: {"scatter": _scatter_to_one},
    }


def _forget_answers() -> None:
    """Empties the caches of functions that keep whether there is a GPU, and which packages are."""
    for name in ("transformers.utils.import_utils", "torch.utils._triton"):
        for function in [*vars(sys.modules.get(name, object)).values()]:
            asks = getattr(getattr(function, "__wrapped__", None), "__code__", None)
            if asks is not None and _ASKED & {*asks.co_names}:
                function.cache_clear()


_ASKED = {"cuda", "is_torch_cuda_available", "packages_distributions"}


_CUDA_VERSIONS = {(2, 6): "12.4", (2, 7): "12.6", (2, 8): "12.8", (2, 9): "12.8", (2, 10): "12.8"}
"""The CUDA that PyPI's wheels of a release are built with; 13.0 from 2.11 on."""


_NCCL_VERSION = (2, 27, 5)
"""NCCL in the wheels of 2.9; code asks only whether it knows bfloat16, from 2.10 on (torchtune)."""


def _find_cuda() -> str:
    return _CUDA_VERSIONS.get(release.INSTALLED, "13.0")


_KINDS = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_TRUE = ("is_available", "is_initialized")
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
    module: Any, inputs: Any, kwargs: Any, device_ids: Sequence[Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Scatters to the only GPU, as ``torch/nn/parallel/scatter_gather.py`` does."""
    if len(device_ids) > 1:
        what = f"DataParallel on {len(device_ids)} GPUs is not modelled"
        raise TraceError(what, hint="device_ids=[0], with its part of the batch")
    moved = tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), (inputs, kwargs))
    return (moved[0],), (moved[1] or {},)
