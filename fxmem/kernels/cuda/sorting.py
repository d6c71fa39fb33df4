"""Sorting, order statistics, running sums and drawing on CUDA.

Source: ``aten/src/ATen/native/cuda/Sort.cpp``, ``SortStable.cu``, ``TensorTopK.cu``,
``Sorting.cpp``, ``ScanKernels.cpp`` and ``Randperm.cu``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fxmem.fakes.fake_mode import LeanDispatchMode
from fxmem.kernels.cuda.gpu import CUDA, current_gpu
from fxmem.kernels.registry import OperatorCall
from fxmem.kernels.workspace import dense_bytes, size_bytes
from fxmem.versions.operators import aten

_INDEX_BYTES = 8
# Sort.h, ``should_use_small_sort``; SortStable.cu, ``launch_stable_sort_kernel``.
_SMALL = 4096
_LARGE = 1000000
_MANY_SEGMENTS = 128
_UNLIKELY = 0.9
"""Randperm.cu: how likely it is that no keys are equal."""


def sort_bytes(sizes: Sequence[int], strides: Sequence[int], dim: int, itemsize: int) -> int:
    """Sort.cpp, ``sort_cuda_kernel``: bytes beside sorted values and indices.

    Args:
        sizes: Of a dense tensor.
        strides: Of the tensor, in elements.
        dim: That is sorted.
        itemsize: Of an element.
    """
    if not sizes:
        return _INDEX_BYTES
    length = sizes[dim]
    if length <= _SMALL:
        return length * _INDEX_BYTES  # ``fillSliceWithIndex``
    count = math.prod(sizes)
    copies = 0 if strides[dim] == 1 else count * (2 * itemsize + _INDEX_BYTES)
    return copies + _segments_bytes(count, length, itemsize)


def _segments_bytes(count: int, length: int, itemsize: int) -> int:
    """SortStable.cu: one after the other, all together, or by CUB's segmented sort."""
    segments = count // max(length, 1)
    if segments == 1 or length >= _LARGE:
        return length * _INDEX_BYTES + radix_sort_bytes(length, itemsize, _INDEX_BYTES)
    if segments >= _MANY_SEGMENTS:
        # ``DeviceSegmentedRadixSort::SortPairs``: a third copy of all pairs.
        return count * _INDEX_BYTES + _alias(count * itemsize, count * _INDEX_BYTES)
    pairs = count * itemsize + radix_sort_bytes(count, itemsize, _INDEX_BYTES)
    bits = max(1, (segments - 1).bit_length())
    return 2 * count * _INDEX_BYTES + max(pairs, radix_sort_bytes(count, _INDEX_BYTES, 0, bits))


class _CheckLess(LeanDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves a check of values undone that C++ makes of tensors on the host alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return True if func is aten.equal.default else func(*args, **(kwargs or {}))


def _register_quantile(function: Callable[..., Any]) -> None:
    """aten/src/ATen/native/Sorting.cpp, ``quantile_impl``: is each of them between 0 and 1?"""

    @CUDA.function(function)
    def find_quantile(*args: Any, **kwargs: Any) -> Any:
        with _CheckLess():  # type: ignore[no-untyped-call]
            return function(*args, **kwargs)


for _quantile in (torch.quantile, torch.nanquantile, Tensor.quantile, Tensor.nanquantile):
    _register_quantile(_quantile)


def _register_sort(overload: OpOverload) -> None:
    names = [value.name for value in overload._schema.arguments]

    def estimate(call: OperatorCall) -> int:
        x = call.tensor(0)
        found = call.get(names.index("dim"), "dim")
        dim = int(str(found)) if found is not None else -1
        return sort_bytes(x.shape, x.stride(), dim, x.element_size())

    CUDA.workspace(overload)(estimate)


_register_sort(aten.sort.default)
_register_sort(aten.sort.stable)


@CUDA.workspace("topk")
def _topk(call: OperatorCall) -> int:
    """TensorTopK.cu, ``launch_gather_topk_kernel``: a contiguous input, and counts by block."""
    x = call.tensor(0)
    found = call.get(2, "dim")
    length = x.shape[int(str(found)) if found is not None else -1] if x.dim() else 1
    slices = x.numel() // max(length, 1)
    copied = dense_bytes(x)
    if not _is_shared(slices, length):
        return copied
    threads, digits = 256, 256
    blocks_by_multiprocessor = 65536 // (40 * threads)  # by registers
    room = current_gpu().multiprocessors * blocks_by_multiprocessor * threads
    items = max(4, min(-(-length * slices // room), 64))
    blocks = slices * -(-length // (items * threads))
    by_slice = x.element_size() + 4 + 4 + max(4, x.element_size())
    by_block = digits * 2 + 4 + 4
    return copied + slices * by_slice + blocks * by_block + scan_bytes(blocks, 4)


def _is_shared(slices: int, length: int) -> bool:
    """``should_use_multiblock``: several blocks for each slice."""
    limits = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
    return length >= next((least for most, least in limits if slices <= most), 400)


@CUDA.workspace("cumsum", "cumprod", "logcumsumexp")
def _cumulative(call: OperatorCall) -> int:
    """ReduceOps.cpp, ``impl_func_cum_ops``, and ScanUtils.cuh, ``scan_dim``.

    The input in the result's type and contiguous; CUB serves where all elements are one line.
    """
    x, out = call.tensor(0), call.result
    copied = size_bytes(out) if x.dtype != out.dtype else dense_bytes(x)
    line = x.dim() and x.numel() == x.shape[int(str(call.args[1]))]
    return copied + (scan_bytes(x.numel(), out.element_size()) if line else 0)


@CUDA.workspace("multinomial")
def _multinomial(call: OperatorCall) -> int:
    """aten/src/ATen/native/Distributions.cpp, ``multinomial_out``; cuda/MultinomialKernel.cu.

    A race of exponential variates, whose best are found; or normalized weights, added up.
    """
    x, samples = call.tensor(0), int(str(call.args[1]))
    if call.get(2, "replacement") is True and samples > 1:
        return 2 * size_bytes(x)
    return size_bytes(x) + (call.result.numel() * x.element_size() if samples > 1 else 0)


@CUDA.workspace("randperm", "randperm.generator")
def _randperm(call: OperatorCall) -> int:
    """cuda/Randperm.cu, ``randperm_out_cuda``: a range, sorted by random keys, and those sorted.

    The keys have as many bits as make equal ones unlikely.
    """
    count, itemsize = call.result.numel(), call.result.element_size()
    if not count:
        return 0
    pairs = count - (6 * count * count + 1) / (12 * math.log(_UNLIKELY))
    bits = min(64, math.ceil(math.log2(pairs)))
    key_bytes = 4 if bits <= 32 else 8
    return count * (itemsize + 2 * key_bytes) + radix_sort_bytes(count, key_bytes, itemsize, bits)


CUDA.leave_out(
    "the sizes of its buffers depend on the values",
    *("_unique", "_unique2", "unique_consecutive", "unique_dim", "mode", "bincount"),
)


# -- Temporary storage of CUB --

_ALIGNMENT = 256
_DIGITS = 256
_DIGIT_BITS = 8
_OFFSET_BYTES = 8
_COUNTER_BYTES = 4
_PADDING_TILES = 32


def radix_sort_bytes(count: int, key_bytes: int, value_bytes: int, bits: int | None = None) -> int:
    """Temporary storage of ``DeviceRadixSort::SortPairs`` and ``SortKeys``.

    Args:
        count: Pairs.
        key_bytes: Size of a key.
        value_bytes: Size of a value; 0 for keys alone.
        bits: That are sorted by; all of the key's if None.

    >>> radix_sort_bytes(1000, 8, 8)  # one tile: nothing but the kernel's own memory
    1
    """
    widest = max(key_bytes, value_bytes, 4)
    if count <= 256 * max(1, 19 * 4 // widest):
        return 1
    passes = -(-(8 * key_bytes if bits is None else bits) // _DIGIT_BITS)
    tiles = -(-count // (384 * max(1, 21 * 4 // widest)))
    copies = count if passes > 1 else 0
    return _alias(
        passes * _DIGITS * _OFFSET_BYTES,
        tiles * _DIGITS * _COUNTER_BYTES,
        copies * key_bytes,
        copies * value_bytes,
        passes * _COUNTER_BYTES,
    )


def scan_bytes(count: int, itemsize: int) -> int:
    """Temporary storage of ``DeviceScan`` and of kernels that scan: a state for each tile."""
    tiles = -(-count // (128 * max(1, 15 * 4 // max(itemsize, 4))))
    return _alias((tiles + _PADDING_TILES) * 2 * max(itemsize, 4))


def _alias(*sizes: int) -> int:
    """``alias_temporaries``: parts of one allocation, each aligned."""
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes) + _ALIGNMENT - 1
