"""Sorting, order statistics and drawing on the CPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fxmem.kernels.arguments import argument, new_bytes, tensor
from fxmem.kernels.cpu.copying import contiguous_copies_bytes, transposing_buffer_bytes
from fxmem.kernels.cpu.target import CPU
from fxmem.kernels.tape import size_bytes
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten
_INDEX_BYTES = 8


@CPU.workspace(_aten.sort.default, _aten.sort.stable)
def _sort(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/Sorting.cpp, ``sort_stable_out``: the initial indices."""
    x = tensor(args[0])
    found = args[-1] if len(args) > 1 else kwargs.get("dim", -1)
    dim = found if isinstance(found, int) and not isinstance(found, bool) else -1
    return x.shape[dim] * _INDEX_BYTES if x.dim() else 0


@CPU.workspace(_aten.kthvalue.default)
def _kthvalue(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Sorting.cpp, ``kthvalue_out_impl_cpu``: values and indices to be partitioned."""
    x = tensor(args[0])
    return size_bytes(x) + x.numel() * _INDEX_BYTES


@CPU.workspace(_aten.median.dim, _aten.nanmedian.dim)
def _median(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Sorting.cpp, ``median_with_indices_impl``: the dimension is made the innermost."""
    x = tensor(args[0])
    if not x.dim():
        return 0
    moved = x.transpose(int(str(args[1])), -1)
    return 0 if moved.is_contiguous() else size_bytes(x) + transposing_buffer_bytes(moved)


@CPU.workspace(_aten.median.default, _aten.nanmedian.default)
def _median_of_all(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Sorting.cpp, ``median_impl``: a copy to be partitioned."""
    return size_bytes(tensor(args[0]))


@CPU.workspace(_aten.multinomial.default)
def _multinomial(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/Distributions.cpp, ``multinomial_out``.

    Without replacement: a race of exponential variates, beside the extremes of the weights and
    what was asked of them; with it: the running sums of one row.
    """
    x, samples = tensor(args[0]), int(str(args[1]))
    itemsize = x.element_size()
    if argument(args, kwargs, 2, "replacement") is True and samples > 1:
        return x.shape[-1] * itemsize
    checks = 2 * itemsize + 2
    values = tensor(outputs).numel() * itemsize if samples > 1 else 0
    return checks + size_bytes(x) + values


@CPU.workspace(_aten._sample_dirichlet.default)
def _dirichlet(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/Distributions.cpp, ``_s_dirichlet_cpu``: variates as doubles, summed."""
    x = tensor(args[0])
    return (x.numel() + x.numel() // max(1, x.shape[-1])) * torch.float64.itemsize


@CPU.workspace(_aten._unique2.default)
def _unique(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/Unique.cpp, ``unique_cpu_sorted_template``: sorted, with indices.

    Then the results are allocated, and where each run begins if runs are counted. Bits are not
    sorted.
    """
    assert isinstance(outputs, (tuple, list))
    x, counts = tensor(args[0]), tensor(outputs[2])
    copied = contiguous_copies_bytes(x)
    if x.dtype == torch.bool:
        return copied
    indices = x.numel() * _INDEX_BYTES
    inside = copied + size_bytes(x) + indices
    starts = (counts.numel() + 1) * _INDEX_BYTES if counts.numel() else 0
    return inside + max(starts, indices - new_bytes(outputs))


@CPU.workspace(_aten.unique_dim.default)
def _unique_rows(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Unique.cpp, ``_unique_dim_cpu_template``: the dimension outermost, and the rows sorted."""
    x, dim = tensor(args[0]), int(str(args[1]))
    return contiguous_copies_bytes(x.movedim(dim, 0)) + size_bytes(x)


@CPU.workspace(_aten.unique_dim_consecutive.default)
def _row_runs(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Unique.cpp, likewise, without sorting."""
    return contiguous_copies_bytes(tensor(args[0]).movedim(int(str(args[1])), 0))
