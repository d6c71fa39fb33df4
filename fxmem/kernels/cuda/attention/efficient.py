"""Memory-efficient attention on CUDA: seeds on the host, and workspaces of its kernels.

Source: ``aten/src/ATen/native/transformers/cuda/attention.cu``, ``attention_backward.cu`` and
``mem_eff_attention/kernel_forward.h``, ``kernel_backward.h``. There is a kernel for each type,
architecture and largest head dimension; the first that fits is taken, and its blocks decide how
much memory it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxmem.graph import Blocks
from fxmem.kernels.cuda.attention.backends import read_settings
from fxmem.kernels.cuda.attention.flash import round_up
from fxmem.kernels.cuda.gpu import CUDA, current_gpu, measure_shared_memory
from fxmem.kernels.registry import OperatorCall, as_tensor, storage_bytes
from fxmem.kernels.workspace import BlockTrace, PeakTrace, size_bytes
from fxmem.versions.operators import aten

_FLOAT = 4
_HALVES = (torch.float16, torch.bfloat16)
_IN_REGISTERS = 128
"""The largest head dimension whose result the forward kernel holds in registers."""
_ANY = 65536
_GRADIENT_HEADER = 16
"""``GradQTempStorage``: a lock and a counter before the block."""
_MAX_SPLIT_WORK = 200
_MAX_BATCH = 65535
"""Larger batches are attended to in chunks of this size."""
_MASK_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class _Kernel:
    """``AttentionBackwardKernel`` with its parameters."""

    rows: int  # ``kBlockSizeI``, queries in a block
    columns: int  # ``kBlockSizeJ``, keys in a block
    max_head_dim: int  # ``kMaxK``
    shared_bytes: int  # ``sizeof(SharedStorage)``, as in PyTorch 2.13's binary
    # the same for the kernel with dropout; None where there is none
    shared_dropout_bytes: int | None

    def is_in_registers(self, dtype: torch.dtype) -> bool:
        """``kOutputInRF``: the gradients of keys and values never leave the registers."""
        return dtype in _HALVES and self.max_head_dim <= self.rows


# mem_eff_attention/kernels/cutlassB.h: in the order in which they are tried. The variants for
# lengths that are multiples of the blocks need the same, and are left out.
_FLOAT_SM80 = (
    _Kernel(64, 64, 32, 53504, 53504),
    _Kernel(64, 64, 64, 53504, 53504),
    _Kernel(128, 64, 128, 121344, 121344),
    _Kernel(64, 64, 128, 67840, 67840),
    _Kernel(128, 64, _ANY, 121344, 121344),
    _Kernel(64, 64, _ANY, 67840, 67840),
)
_HALF_SM80 = (
    _Kernel(64, 64, 32, 40192, 40192),
    _Kernel(64, 64, 64, 44288, 52480),
    _Kernel(128, 64, 96, 91648, None),
    _Kernel(128, 128, 128, 154112, 162304),
    _Kernel(64, 64, 128, 34048, 34048),
    _Kernel(128, 64, _ANY, 60928, 60928),
)
_BFLOAT_SM80 = (
    _Kernel(64, 64, 32, 34560, 39168),
    _Kernel(64, 64, 64, 42240, 51456),
    _Kernel(128, 64, 96, 91648, None),
    _Kernel(128, 128, 128, 133632, 152064),
    _Kernel(64, 64, 128, 34048, 34048),
    _Kernel(128, 64, _ANY, 60928, 60928),
)
_FLOAT_SM70 = (_Kernel(64, 64, _ANY, 37120, 37120),)
_HALF_SM70 = (
    _Kernel(64, 64, 32, 27904, 27904),
    _Kernel(64, 64, 64, 27904, 27904),
    _Kernel(128, 64, 128, 54784, 54784),
    _Kernel(128, 64, _ANY, 54784, 54784),
)


@CUDA.kernel("_scaled_dot_product_efficient_attention")
def _outputs(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``_efficient_attention_forward``: no graph is captured, so seed and offset are the host's.

    Raises:
        RuntimeError: If there is dropout in a batch that goes in chunks, as on a GPU.
    """
    if query.shape[0] > _MAX_BATCH and OperatorCall(args, kwargs).get(2, "dropout_p"):
        raise RuntimeError(
            "Efficient attention cannot produce valid seed and offset outputs when the batch size "
            f"exceeds ({_MAX_BATCH})."
        )
    results = aten._scaled_dot_product_efficient_attention(query, key, value, *args, **kwargs)
    return (*results[:2], *_make_seeds())


@CUDA.kernel("_efficient_attention_forward")
def _outputs_of_rows(*args: Any, **kwargs: Any) -> Any:
    """As xformers calls it."""
    results = aten._efficient_attention_forward(*args, **kwargs)
    return (*results[:2], *_make_seeds(), *results[4:])


def _make_seeds() -> list[Tensor]:
    return [torch.empty((), dtype=torch.int64, device="cpu") for _ in range(2)]


@CUDA.workspace("_efficient_attention_forward")
def _forward_of_rows(call: OperatorCall) -> int:
    return _accumulated_bytes(*(as_tensor(call.get(i, x)) for i, x in ((0, "query"), (2, "value"))))


def _accumulated_bytes(query: Tensor, value: Tensor) -> int:
    """``output_accum``, the result in float, where a block does not hold whole rows."""
    if query.dtype in _HALVES and max(query.shape[3], value.shape[3]) > _IN_REGISTERS:
        return query.numel() // query.shape[3] * value.shape[3] * _FLOAT
    return 0


@CUDA.workspace("_scaled_dot_product_efficient_attention")
def _forward(call: OperatorCall) -> int:
    """``_scaled_dot_product_efficient_attention_cuda``: results of chunks beside the whole.

    The first chunk's live to the end.
    """
    query, value = call.tensor(0), call.tensor(2)
    batch, accumulated = query.shape[0], _accumulated_bytes(query, value)
    if batch <= _MAX_BATCH:
        return accumulated
    results = sum(size_bytes(as_tensor(x)) for x in call.outputs[:2])
    trace = PeakTrace()
    for start in range(0, batch, _MAX_BATCH):
        size = min(_MAX_BATCH, batch - start)
        made = trace.allocate(results // batch * size)
        trace.free(trace.allocate(accumulated // batch * size))
        if start:
            trace.free(made)
        else:
            trace.allocate(results)
    return trace.peak_bytes - results


@CUDA.kernel("_scaled_dot_product_efficient_attention_backward")
def _gradients(*args: Any, **kwargs: Any) -> Any:
    """``_efficient_attention_backward``: rows of a mask's gradient are padded, the last one too."""
    results = aten._scaled_dot_product_efficient_attention_backward(*args, **kwargs)
    if results[3] is None:
        return results
    mask = args[4]
    length = mask.shape[-1]
    padded = mask.new_empty((*mask.shape[:-1], round_up(length, _MASK_ALIGNMENT)))
    return (*results[:3], padded[..., :length])


@CUDA.workspace("_scaled_dot_product_efficient_attention_backward")
def _backward(call: OperatorCall) -> Blocks:
    """``_scaled_dot_product_efficient_attention_backward_cuda``: gradients of chunks beside all."""
    operands = [as_tensor(arg) for arg in call.args[:4]]
    has_dropout = bool(call.get(9, "dropout_p"))
    results = [x for x in call.outputs if isinstance(x, Tensor)]
    trace, batch = BlockTrace(), operands[1].shape[0]
    if batch > _MAX_BATCH:
        trace.allocate(sum(map(storage_bytes, results)) // batch * _MAX_BATCH)
        operands, results = [x[:_MAX_BATCH] for x in operands], []
    _add_backward(trace, operands, has_dropout, len(results))
    return trace.finish()


_BACKWARD_NAMES = [
    argument.name for argument in aten._efficient_attention_backward.default._schema.arguments
]


@CUDA.kernel("_efficient_attention_backward")
def _gradients_of_rows(*args: Any, **kwargs: Any) -> Any:
    """A mask that wants no gradient gets none; the seed is the host's, or empty."""
    bound = dict(zip(_BACKWARD_NAMES, args, strict=False)) | kwargs
    bound |= dict(zip(("philox_seed", "philox_offset"), _make_seeds(), strict=True))
    results = aten._efficient_attention_backward(**bound)
    if bound["bias_requires_grad"]:
        return results
    return (*results[:3], results[0].new_empty(0))


@CUDA.workspace("_efficient_attention_backward")
def _backward_of_rows(call: OperatorCall) -> Blocks:
    names = enumerate(("grad_out_", "query", "key", "value"))
    operands = [as_tensor(call.get(i, name)).transpose(1, 2) for i, name in names]
    trace, lengths = BlockTrace(), None
    if (starts := call.get(6, "cu_seqlens_q")) is not None:
        longest = (call.get(8, "max_seqlen_q"), call.get(9, "max_seqlen_k"))
        lengths = (starts.numel() - 1, *longest)
    results = 3 + (call.get_result(3).numel() > 0)
    _add_backward(trace, operands, bool(call.get(11, "dropout_p")), results, lengths)
    return trace.finish()


def _add_backward(
    trace: BlockTrace,
    operands: Sequence[Tensor],
    has_dropout: bool,
    results: int,
    lengths: tuple[int, ...] | None = None,
) -> None:
    """``_efficient_attention_backward``.

    The gradient in the order batch, row, head; the results; the sums of its products with the
    result; the workspace. Where the kernel does not compute those sums (``kKernelComputesDelta``),
    they are ``(grad_out.to(kFloat) * out.to(kFloat)).sum(-1).transpose(-2, -1).contiguous()``.
    """
    grad, query, key, value = operands
    kernel = choose_kernel(query, value, has_dropout)
    sums_bytes = grad.numel() // grad.shape[3] * _FLOAT
    if not grad.transpose(1, 2).is_contiguous():
        trace.allocate(size_bytes(grad))
    for gradient in range(results):
        trace.allocate_result(gradient)
    in_registers, is_volta = kernel.is_in_registers(query.dtype), current_gpu().capability < (7, 5)
    if query.dtype in _HALVES and (in_registers or not is_volta):
        trace.allocate(sums_bytes)
    else:
        factors = 0 if grad.dtype == torch.float32 else 2
        freed = [trace.allocate(grad.numel() * _FLOAT) for _ in range(factors + 1)]
        sums = trace.allocate(sums_bytes)
        if grad.shape[1] > 1 and grad.shape[2] > 1:  # else the transposed sums are contiguous
            freed.append(sums)
            trace.allocate(sums_bytes)
        trace.free(*freed)
    batch, heads, queries, _ = query.shape
    batch, queries, keys = lengths or (batch, queries, key.shape[2])
    trace.allocate(workspace_bytes(kernel, query, value, (batch * heads, queries, keys)))


def choose_kernel(query: Tensor, value: Tensor, has_dropout: bool) -> _Kernel:
    """``dispatch_cutlassB``: the first kernel that takes the head dimensions and fits.

    Raises:
        RuntimeError: If there is none, as on a GPU.
    """
    capability, dtype = current_gpu().capability, query.dtype
    kernels: tuple[_Kernel, ...]
    if capability >= (8, 0):
        kernels = {torch.float16: _HALF_SM80, torch.bfloat16: _BFLOAT_SM80}.get(dtype, _FLOAT_SM80)
    else:
        kernels = _HALF_SM70 if dtype == torch.float16 else _FLOAT_SM70
    available = measure_shared_memory(max(capability, (7, 0)))
    head_dim = max(query.shape[3], value.shape[3])
    for kernel in kernels:
        shared = kernel.shared_dropout_bytes if has_dropout else kernel.shared_bytes
        is_for_small = kernel.max_head_dim == 96
        if is_for_small and capability not in ((8, 6), (8, 9)):
            continue
        if head_dim <= kernel.max_head_dim and shared and shared <= available:
            return kernel
    raise RuntimeError("cutlassB: no kernel found to launch!")


def workspace_bytes(
    kernel: _Kernel, query: Tensor, value: Tensor, sizes: tuple[int, int, int]
) -> int:
    """``Params::workspace_size``: float blocks of gradients that several writers add to.

    Args:
        kernel: The kernel.
        query: Its last dimension and dtype are read.
        value: Its last dimension is read.
        sizes: Pairs of batch and head, queries and keys of each.
    """
    (work, queries, keys), head_dim, elements = sizes, query.shape[3], 0
    if not kernel.is_in_registers(query.dtype) and query.dtype in _HALVES:
        splits = -(-keys // kernel.columns)  # ``num_splits_key``
        if work >= 256 and keys <= 2 * kernel.columns:
            splits = 1
        splits = max(1, min(splits, _MAX_SPLIT_WORK // work))
        if read_settings(current_gpu()).is_deterministic:
            splits = 1
        dims = round_up(head_dim, kernel.rows) + round_up(value.shape[3], kernel.rows)
        elements += splits * kernel.columns * dims
    block = _GRADIENT_HEADER + kernel.rows * kernel.columns * _FLOAT
    blocks = -(-queries // kernel.rows) * -(-head_dim // kernel.columns)
    elements += blocks * block // _FLOAT
    return work * round_up(elements, 4) * _FLOAT
