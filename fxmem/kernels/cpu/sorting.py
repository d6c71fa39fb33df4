"""Sorting, order statistics and drawing on the CPU."""

from __future__ import annotations

import torch

from fxmem.kernels.cpu.copying import contiguous_copies_bytes, transposing_buffer_bytes
from fxmem.kernels.registry import CPU, Call
from fxmem.kernels.workspace import size_bytes

_aten = torch.ops.aten
_INDEX_BYTES = 8


@CPU.workspace("sort", "sort.stable")
def _sort(call: Call) -> int:
    """aten/src/ATen/native/Sorting.cpp, ``sort_stable_out``: the initial indices."""
    x = call.tensor(0)
    found = call.args[-1] if len(call.args) > 1 else call.kwargs.get("dim", -1)
    dim = found if isinstance(found, int) and not isinstance(found, bool) else -1
    return x.shape[dim] * _INDEX_BYTES if x.dim() else 0


@CPU.workspace("kthvalue")
def _kthvalue(call: Call) -> int:
    """Sorting.cpp, ``kthvalue_out_impl_cpu``: values and indices to be partitioned."""
    x = call.tensor(0)
    return size_bytes(x) + x.numel() * _INDEX_BYTES


@CPU.workspace("median.dim", "nanmedian.dim")
def _median(call: Call) -> int:
    """Sorting.cpp, ``median_with_indices_impl``: the dimension is made the innermost."""
    x = call.tensor(0)
    if not x.dim():
        return 0
    moved = x.transpose(int(str(call.args[1])), -1)
    return 0 if moved.is_contiguous() else size_bytes(x) + transposing_buffer_bytes(moved)


@CPU.workspace("median", "nanmedian")
def _median_of_all(call: Call) -> int:
    """Sorting.cpp, ``median_impl``: a copy to be partitioned."""
    return size_bytes(call.tensor(0))


@CPU.workspace("multinomial")
def _multinomial(call: Call) -> int:
    """aten/src/ATen/native/Distributions.cpp, ``multinomial_out``.

    Without replacement: a race of exponential variates, beside the extremes of the weights and
    what was asked of them; with it: the running sums of one row.
    """
    x, samples = call.tensor(0), int(str(call.args[1]))
    itemsize = x.element_size()
    if call.get(2, "replacement") is True and samples > 1:
        return x.shape[-1] * itemsize
    checks = 2 * itemsize + 2
    values = call.result.numel() * itemsize if samples > 1 else 0
    return checks + size_bytes(x) + values


@CPU.workspace("_unique2")
def _unique(call: Call) -> int:
    """aten/src/ATen/native/Unique.cpp, ``unique_cpu_sorted_template``: sorted, with indices.

    Then the results are allocated, and where each run begins if runs are counted. Bits are not
    sorted.
    """
    assert isinstance(call.outputs, (tuple, list))
    x, counts = call.tensor(0), call.get_result(2)
    copied = contiguous_copies_bytes(x)
    if x.dtype == torch.bool:
        return copied
    indices = x.numel() * _INDEX_BYTES
    inside = copied + size_bytes(x) + indices
    starts = (counts.numel() + 1) * _INDEX_BYTES if counts.numel() else 0
    return inside + max(starts, indices - call.result_bytes)
