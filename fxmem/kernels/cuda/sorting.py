"""Sorting, order statistics, running sums and drawing on CUDA.

Source: ``aten/src/ATen/native/cuda/Sort.cpp``, ``SortStable.cu``, ``TensorTopK.cu``,
``Sorting.cpp``, ``ScanKernels.cpp`` and ``Randperm.cu``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from fxmem.kernels.arguments import argument, tensor
from fxmem.kernels.cuda.cub import radix_sort_bytes, scan_bytes, segmented_radix_sort_bytes
from fxmem.kernels.cuda.layouts import dense_bytes, flatten_bytes
from fxmem.kernels.cuda.target import CUDA, current_gpu
from fxmem.kernels.tape import size_bytes
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten
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
    count = 1
    for size in sizes:
        count *= size
    copies = 0 if strides[dim] == 1 else count * (2 * itemsize + _INDEX_BYTES)
    return copies + _segments_bytes(count, length, itemsize)


def _segments_bytes(count: int, length: int, itemsize: int) -> int:
    """SortStable.cu: one after the other, all together, or by CUB's segmented sort."""
    segments = count // max(length, 1)
    if segments == 1 or length >= _LARGE:
        return length * _INDEX_BYTES + radix_sort_bytes(length, itemsize, _INDEX_BYTES)
    if segments >= _MANY_SEGMENTS:
        return count * _INDEX_BYTES + segmented_radix_sort_bytes(count, itemsize, _INDEX_BYTES)
    pairs = count * itemsize + radix_sort_bytes(count, itemsize, _INDEX_BYTES)
    bits = max(1, (segments - 1).bit_length())
    return 2 * count * _INDEX_BYTES + max(pairs, radix_sort_bytes(count, _INDEX_BYTES, 0, bits))


def _register_sort(overload: OpOverload) -> None:
    names = [value.name for value in overload._schema.arguments]

    def estimate(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
        x = tensor(args[0])
        found = argument(args, kwargs, names.index("dim"), "dim")
        dim = int(str(found)) if found is not None else -1
        return sort_bytes(x.shape, x.stride(), dim, x.element_size())

    CUDA.workspace(overload)(estimate)


_register_sort(_aten.sort.default)
_register_sort(_aten.sort.stable)


@CUDA.workspace(_aten.topk.default)
def _topk(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """TensorTopK.cu, ``launch_gather_topk_kernel``: a contiguous input, and counts by block."""
    x = tensor(args[0])
    found = argument(args, kwargs, 2, "dim")
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
    for most, least in (
        (20, 20000),
        (40, 10000),
        (80, 8000),
        (199, 5000),
        (799, 3000),
        (4000, 800),
    ):
        if slices <= most:
            return length >= least
    return length >= 400


@CUDA.workspace(_aten.kthvalue.default, _aten.median.dim, _aten.nanmedian.dim)
def _kth(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Sorting.cpp, ``kthvalue_out_cuda``, ``median_with_indices_impl``: a contiguous input."""
    return dense_bytes(tensor(args[0]))


@CUDA.workspace(_aten.median.default, _aten.nanmedian.default)
def _median(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Sorting.cpp, ``median_impl``: all elements, sorted."""
    x = tensor(args[0])
    inside = sort_bytes((x.numel(),), (1,), 0, x.element_size())
    return flatten_bytes(x) + size_bytes(x) + x.numel() * _INDEX_BYTES + inside


@CUDA.workspace(_aten.cumsum.default, _aten.cumprod.default, _aten.logcumsumexp.default)
def _cumulative(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """ReduceOps.cpp, ``impl_func_cum_ops``, and ScanUtils.cuh, ``scan_dim``.

    The input in the result's type and contiguous; CUB serves where all elements are one line.
    """
    x, out = tensor(args[0]), tensor(outputs)
    copied = size_bytes(out) if x.dtype != out.dtype else dense_bytes(x)
    line = x.dim() and x.numel() == x.shape[int(str(args[1]))]
    return copied + (scan_bytes(x.numel(), out.element_size()) if line else 0)


@CUDA.workspace(_aten.cummax.default, _aten.cummin.default)
def _cumulative_extreme(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """ScanUtils.cuh, ``scan_dim_with_indices``: a contiguous input."""
    return dense_bytes(tensor(args[0]))


@CUDA.workspace(_aten.multinomial.default)
def _multinomial(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/Distributions.cpp, ``multinomial_out``; cuda/MultinomialKernel.cu.

    A race of exponential variates, whose best are found; or normalized weights, added up.
    """
    x, samples = tensor(args[0]), int(str(args[1]))
    if argument(args, kwargs, 2, "replacement") is True and samples > 1:
        return 2 * size_bytes(x)
    return size_bytes(x) + (tensor(outputs).numel() * x.element_size() if samples > 1 else 0)


@CUDA.workspace(_aten.randperm.default, _aten.randperm.generator)
def _randperm(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """cuda/Randperm.cu, ``randperm_out_cuda``: a range, sorted by random keys, and those sorted.

    The keys have as many bits as make equal ones unlikely.
    """
    count, itemsize = tensor(outputs).numel(), tensor(outputs).element_size()
    if not count:
        return 0
    pairs = count - (6 * count * count + 1) / (12 * math.log(_UNLIKELY))
    bits = min(64, math.ceil(math.log2(pairs)))
    key_bytes = 4 if bits <= 32 else 8
    return count * (itemsize + 2 * key_bytes) + radix_sort_bytes(count, key_bytes, itemsize, bits)


@CUDA.workspace(_aten.searchsorted.Tensor, _aten.bucketize.Tensor)
def _search(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """cuda/Bucketization.cu, ``searchsorted_out_cuda``: dense operands of one type."""
    operands = [value for value in args[:2] if isinstance(value, Tensor)]
    return sum(dense_bytes(x) for x in operands)


_VALUES_DECIDE = "how much it sorts and keeps depends on the values"
for _operator in (
    _aten._unique.default,
    _aten._unique2.default,
    _aten.unique_consecutive.default,
    _aten.unique_dim.default,
    _aten.mode.default,
    _aten.bincount.default,
):
    CUDA.unmodelled[_operator] = _VALUES_DECIDE
