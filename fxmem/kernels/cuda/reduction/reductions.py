"""Reductions on CUDA: casts of the whole input, and the buffers of :mod:`.reduce_kernel`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import compute_elementwise_output_strides

from fxmem.graph import Blocks, measure_blocks
from fxmem.kernels.cuda.gpu import CUDA
from fxmem.kernels.cuda.reduction.iterator import Kernel, make_reduction, take_reduction
from fxmem.kernels.registry import OperatorCall
from fxmem.kernels.workspace import BlockTrace, size_bytes
from fxmem.versions.operators import find_operators

_HALF = (torch.float16, torch.bfloat16)
_INDEX_BYTES = 8
_PAIR_BYTES = 16
"""A value of any real type and an index of 8 bytes."""

KernelOf = Callable[[torch.dtype, torch.dtype], Kernel]
"""From the types of input and output to the kernel."""


def accumulate(source: torch.dtype, result: torch.dtype) -> Kernel:
    """``ReduceSumProdKernel.cu`` (``nansum``, ``prod``), ``ReduceNormKernel.cu``."""
    return Kernel(
        4 if source in _HALF else source.itemsize,
        in_output=not (source in _HALF and source == result),
        max_threads=256 if source == torch.complex128 else 512,
    )


def add(source: torch.dtype, result: torch.dtype) -> Kernel:
    """``ReduceSumProdKernel.cu``, ``sum_functor``; ``ReduceMomentKernel.cu``, ``mean``."""
    kernel = accumulate(source, result)
    vector = 8 if source.itemsize == 2 else 4
    return Kernel(kernel.accumulator_bytes, vector, kernel.in_output, kernel.max_threads)


def spread(source: torch.dtype, result: torch.dtype) -> Kernel:
    """``ReduceMomentKernel.cu``, ``std_var_kernel_impl``: ``WelfordData``, two at a time."""
    return Kernel(32 if source == torch.float64 else 16, 2, in_output=False)


def _find_extreme(source: torch.dtype, result: torch.dtype) -> Kernel:
    """``ReduceMaxValuesKernel.cu``, ``max_values_kernel_cuda_impl``."""
    return Kernel(source.itemsize, in_output=source not in _HALF)


def _find_extremes(source: torch.dtype, result: torch.dtype) -> Kernel:
    """``ReduceAMinMaxKernel.cu``."""
    return Kernel(2 * source.itemsize, in_output=False)


def _find_index(source: torch.dtype, result: torch.dtype) -> Kernel:
    """``ReduceArgMaxKernel.cu``; ``ReduceMaxValuesKernel.cu``, ``max_launch_kernel``."""
    return Kernel(_PAIR_BYTES, in_output=False)


def _decide(source: torch.dtype, result: torch.dtype) -> Kernel:
    """``ReduceLogicKernel.cu``: in the type of the input."""
    return Kernel(source.itemsize)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the elements of a reduction's input lie; strides and offset in elements."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor) -> Layout:
        """A tensor as it is."""
        return Layout(tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype)

    @staticmethod
    def like(x: Tensor, dtype: torch.dtype) -> Layout:
        """The result of an elementwise operator on a tensor."""
        return Layout(tuple(x.shape), compute_elementwise_output_strides(x), 0, dtype)

    @staticmethod
    def flat(x: Tensor) -> Layout:
        """A contiguous copy, all of which is reduced."""
        return Layout((x.numel(),), (1,), 0, x.dtype)


def reduce(
    trace: BlockTrace,
    x: Layout,
    dims: object,
    keepdim: bool,
    result: torch.dtype,
    kernel_of: KernelOf,
) -> None:
    """Notes what a reduction takes beside its result, its input being of the right type."""
    named = [] if dims is None else dims if isinstance(dims, (list, tuple)) else [dims]
    chosen = [int(str(dim)) % len(x.sizes) for dim in named] if x.sizes else []
    itemsizes = (result.itemsize, x.dtype.itemsize)
    iteration = make_reduction(x.sizes, x.strides, chosen, keepdim, itemsizes, x.offset)
    take_reduction(trace, iteration, kernel_of(x.dtype, result))


def reduce_bytes(
    x: Layout, dims: object, keepdim: bool, result: torch.dtype, kernel_of: KernelOf
) -> int:
    """The most that a reduction of :func:`reduce` holds beside its result."""
    trace = BlockTrace()
    reduce(trace, x, dims, keepdim, result, kernel_of)
    return measure_blocks(trace.finish(), ())


def reduce_cast(
    trace: BlockTrace,
    x: Tensor,
    dims: object,
    keepdim: bool,
    result: torch.dtype,
    kernel_of: KernelOf,
) -> None:
    """As :func:`reduce`, after a cast to the result's type.

    ``make_reduction_from_out_ty``: from half precision to float the kernel casts.
    """
    if x.dtype == result or (x.dtype in _HALF and result == torch.float32):
        reduce(trace, Layout.of(x), dims, keepdim, result, kernel_of)
        return
    copy = trace.allocate(x.numel() * result.itemsize)
    reduce(trace, Layout.like(x, result), dims, keepdim, result, kernel_of)
    trace.free(copy)


def reduce_pair_bytes(
    x: Tensor, dims: object, keepdim: bool, result: torch.dtype, kernel_of: KernelOf
) -> int:
    """As :func:`reduce_cast` where there are two results: bfloat16 is cast to float."""
    if x.dtype == torch.bfloat16 and result == torch.float32:
        copy = Layout.like(x, result)
        copy_bytes = x.numel() * result.itemsize
        return copy_bytes + reduce_bytes(copy, dims, keepdim, result, kernel_of)
    trace = BlockTrace()
    reduce_cast(trace, x, dims, keepdim, result, kernel_of)
    return measure_blocks(trace.finish(), ())


def _register(
    overload: OpOverload, kernel_of: KernelOf, *, casts: bool, copies: bool = False
) -> None:
    """Registers a reduction by the names in its schema.

    It ``casts`` the input to the result's type, or ``copies`` one that is reduced as a whole.
    """
    names = {value.name: at for at, value in enumerate(overload._schema.arguments)}

    def estimate(call: OperatorCall) -> Blocks:
        trace, x = BlockTrace(), call.tensor(0)
        out = call.get_result(0) if isinstance(call.outputs, (tuple, list)) else call.result
        dims = call.get(names["dim"], "dim") if "dim" in names else None
        keepdim = "keepdim" in names and bool(call.get(names["keepdim"], "keepdim"))
        if casts:
            reduce_cast(trace, x, dims, keepdim, out.dtype, kernel_of)
        elif copies and dims is None and not x.is_contiguous():
            trace.allocate(size_bytes(x))
            reduce(trace, Layout.flat(x), None, False, out.dtype, kernel_of)
        else:
            reduce(trace, Layout.of(x), dims, keepdim, out.dtype, kernel_of)
        return trace.finish()

    CUDA.workspace(overload)(estimate)


_CASTS, _AS_THEY_ARE, _COPIES = {"casts": True}, {"casts": False}, {"casts": False, "copies": True}
# aten/src/ATen/native/ReduceOps.cpp and LinearAlgebra.cpp make the iterations.
for _overloads, _kernel, _operands in (
    (("sum", "sum.dim_IntList", "mean", "mean.dim"), add, _CASTS),
    (("nansum", "prod", "prod.dim_int", "linalg_vector_norm"), accumulate, _CASTS),
    (("norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype"), accumulate, _CASTS),
    (("var.correction", "std.correction"), spread, _CASTS),
    (("var_mean.correction", "std_mean.correction"), spread, _CASTS),
    (("amax", "amin"), _find_extreme, _AS_THEY_ARE),
    (("aminmax",), _find_extremes, _AS_THEY_ARE),
    (("max.dim", "min.dim"), _find_index, _AS_THEY_ARE),
    # ``get_allany_iter``: CUDA's kernels cast.
    (("all", "all.dim", "all.dims", "any", "any.dim", "any.dims"), _decide, _AS_THEY_ARE),
    # aten/src/ATen/native/ReduceAllOps.cpp: ``self.contiguous()``.
    (("max", "min"), _find_extreme, _COPIES),
    # ReduceOps.cpp, ``argmax_argmin_impl``: ``self.reshape({-1})``.
    (("argmax", "argmin"), _find_index, _COPIES),
):
    for _overload in find_operators(*_overloads):
        _register(_overload, _kernel, **_operands)


@CUDA.workspace("logsumexp")
def _logsumexp(call: OperatorCall) -> int:
    """ReduceOps.cpp, ``logsumexp_out_impl``: maxima, and the shifted exponentials' sum."""
    x, out = call.tensor(0), call.result
    dims, keepdim = call.args[1], bool(call.get(2, "keepdim"))
    maxima = reduce_bytes(Layout.of(x), dims, True, x.dtype, _find_extreme)
    shifted = reduce_bytes(Layout.like(x, out.dtype), dims, keepdim, out.dtype, add)
    return max(maxima, size_bytes(out) + x.numel() * out.element_size() + shifted)


@CUDA.kernel("histc")
def _make_histogram(x: Tensor, bins: int = 100, *_range: object) -> Tensor:
    """cuda/SummaryOps.cu, ``_histc_cuda``: counts integers too, which the CPU refuses."""
    return x.new_empty((bins,))
