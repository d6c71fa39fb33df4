"""The matrix products that inductor pads, which it measures on the GPU where there is one."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from math import gcd
from typing import Any

import torch
from torch import Tensor

from fxmem.gpus import GpuModel, find_gpu
from fxmem.kernels.cuda.gpu import current_gpu
from fxmem.kernels.registry import Backend
from fxmem.patching import patch

_ALIGNED_BYTES = 16
_SLOWDOWN = {8: 1.5, 4: 1.5, 2: 3.0}
"""By the bytes that rows are aligned to, how much longer tensor cores take than with 16.

Kernels for Hopper read by TMA, which wants 16 bytes; those for Ampere that run instead copy 4 or
more asynchronously (``cp.async``). An H200 padded what these say (tests/data/cuda): each product of
BERT's and GPT-2's vocabularies of 30522 and 50257 words, but for the gradient of BERT's weight.
"""
_Product = tuple[Tensor, Tensor, list[bool]]
"""Two matrices, or batches of them, and which can be padded where they are made."""
_MARGIN = 1.1  # pad_mm.is_padded_faster


@contextlib.contextmanager
def answer_benchmarks(target: Backend) -> Iterator[None]:
    """Answers for the GPU whether a product is faster padded.

    ``torch/_inductor/fx_passes/pad_mm.py`` itself says which could be padded, and which of these
    compute enough to be measured.
    """
    if target.name != "cuda":
        yield
        return
    padding: Any = importlib.import_module("torch._inductor.fx_passes.pad_mm")
    utils: Any = importlib.import_module("torch._inductor.utils")
    gpu = current_gpu().model or find_gpu("a100-80gb")

    def is_on_gpu(*tensors: Tensor) -> bool:
        return all(tensor.device == target.device for tensor in tensors)

    def describe_product(match: Any, *tensors: Any, **_: Any) -> _Product:
        is_free = [padding.should_exclude_padding_time(match, name) for name in ("mat1", "mat2")]
        return tensors[0], tensors[1], is_free

    def is_padded_faster(product: _Product) -> bool:
        return _is_padded_faster(*product, gpu)

    replaced = {
        "has_triton": lambda *_: True,
        "check_device": is_on_gpu,
        "should_pad_bench_key": describe_product,
        "get_cached_should_pad": is_padded_faster,
    }
    if decide := getattr(padding, "_should_pad", None):  # which may keep answers on disk
        replaced["_should_pad"] = inspect.unwrap(decide)
    speed = {
        "get_device_tflops": lambda dtype: (
            (_find_tensor_flops_per_s(gpu, dtype) or gpu.fp32_flops_per_s) / 1e12
        ),
        "get_gpu_dram_gbps": lambda: gpu.bandwidth_bytes_per_s / 1e9,
    }
    with patch({padding: replaced, utils: speed}):
        yield


def _find_tensor_flops_per_s(gpu: GpuModel, dtype: torch.dtype) -> int | None:
    """None where no tensor cores multiply this type; TF32 is as fast as float32 on some GPUs."""
    if dtype != torch.float32:
        return gpu.half_flops_per_s
    is_exact = torch.get_float32_matmul_precision() == "highest"
    return None if is_exact else gpu.tf32_flops_per_s


def _is_padded_faster(left: Tensor, right: Tensor, is_free: list[bool], gpu: GpuModel) -> bool:
    flops_per_s = _find_tensor_flops_per_s(gpu, left.dtype)
    if flops_per_s is None:
        return False
    rows = [right.shape[-1], *(_find_row(each) for each in (left, right))]
    aligned = gcd(_ALIGNED_BYTES, *(int(row) * left.itemsize for row in rows))
    flops = 2 * left.numel() * right.shape[-1]
    as_is_s = flops / flops_per_s * _SLOWDOWN.get(aligned, 1.0)
    copied = [each for each, free in zip((left, right), is_free, strict=True) if not free]
    copied_bytes = sum(2 * each.numel() * each.itemsize for each in copied if _needs_padding(each))
    padded_s = flops / flops_per_s + copied_bytes / gpu.bandwidth_bytes_per_s
    return as_is_s > _MARGIN * padded_s


def _find_row(matrix: Tensor) -> int:
    """The distance of two rows, or of two columns where these lie in one piece."""
    strides = matrix.stride()[-2:]
    return strides[0] if strides[1] == 1 else strides[1]


def _needs_padding(matrix: Tensor) -> bool:
    return any(int(size) * matrix.itemsize % _ALIGNED_BYTES for size in matrix.shape[-2:])
