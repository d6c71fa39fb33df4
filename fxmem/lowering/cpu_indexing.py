"""Indexing, sorting and rearranging on the CPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fxmem.lowering.cpu_registry import Arguments, argument, tensor, workspace
from fxmem.lowering.cpu_tape import size_bytes

_aten = torch.ops.aten
_INDEX_BYTES = 8


@workspace(_aten.embedding.default)
def _embedding(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/Embedding.cpp, ``embedding_symint``: ``indices.reshape(-1)``."""
    indices = tensor(args[1])
    return 0 if indices.is_contiguous() else size_bytes(indices)


@workspace(_aten.embedding_dense_backward.default)
def _embedding_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Embedding.cpp, ``embedding_dense_backward_cpu``: contiguous indices and gradient."""
    operands = (tensor(args[0]), tensor(args[1]))
    return sum(size_bytes(x) for x in operands if not x.is_contiguous())


@workspace(_aten.roll.default)
def _roll(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/TensorTransformations.cpp, ``roll_common``.

    Rolls one dimension and calls itself for the rest, holding each intermediate.
    """
    dims = argument(args, kwargs, 2, "dims")
    count = len(dims) if isinstance(dims, (list, tuple)) else 0
    return max(0, count - 1) * size_bytes(tensor(args[0]))


@workspace(_aten.sort.default, _aten.sort.stable)
def _sort(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/Sorting.cpp, ``sort_stable_out``: the initial indices."""
    x = tensor(args[0])
    found = args[-1] if len(args) > 1 else kwargs.get("dim", -1)
    dim = found if isinstance(found, int) and not isinstance(found, bool) else -1
    return x.shape[dim] * _INDEX_BYTES if x.dim() else 0


@workspace(_aten.cumsum.default, _aten.cumprod.default)
def _cumulative(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/ReduceOps.cpp, ``impl_func_cum_ops``: the input in the result's type."""
    out = tensor(outputs)
    return 0 if tensor(args[0]).dtype == out.dtype else size_bytes(out)


@workspace(_aten.im2col.default)
def _im2col(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/Im2Col.cpp, ``im2col_cpu``: starts with ``empty_like(input)``."""
    return size_bytes(tensor(args[0]))


@workspace(_aten.nll_loss_forward.default)
def _nll_loss(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/LossNLL.cpp, ``nll_loss_out_frame``: contiguous operands."""
    operands = [value for value in args[:3] if isinstance(value, Tensor)]
    return sum(size_bytes(x) for x in operands if not x.is_contiguous())
