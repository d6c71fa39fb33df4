"""Sorting, order statistics and drawing on the CPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fxmem.lowering.arguments import argument, tensor
from fxmem.lowering.cpu.copying import transposing_buffer_bytes
from fxmem.lowering.cpu.target import CPU
from fxmem.lowering.tape import size_bytes
from fxmem.lowering.target import Arguments

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
