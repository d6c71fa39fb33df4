"""Lengths of sequences, which C++ functions read on the host.

``pack_padded_sequence`` computes its batch sizes from lengths, and ``ctc_loss`` its own sizes,
where the lengths are known (:mod:`fxmem.fakes.values`). Batch sizes are then a real tensor:
the loops over packed sequences, which are C++ too, read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fxmem.fakes.branches import assume_passing
from fxmem.fakes.values import find_value, remember_constant
from fxmem.kernels.cuda.gpu import CUDA, is_on_gpu
from fxmem.kernels.registry import ANY, CPU, OperatorCall
from fxmem.versions.operators import aten

_pack = aten._pack_padded_sequence.default
_NONE, _MEAN, _SUM = range(3)
"""``at::Reduction``."""


@ANY.kernel(_pack)
def pack_padded_sequence(input: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    """aten/src/ATen/native/PackedSequence.cpp, ``_pack_padded_sequence``."""
    known = find_value(lengths)
    if known is None:
        return NotImplemented
    with _disable_current_modes():
        steps = torch.arange(int(known[0]))
        batch_sizes, total = (known[:, None] > steps).sum(0), int(known.sum())
    return input.new_empty((total, *input.shape[2:])), batch_sizes


@CPU.workspace(_pack)
@CUDA.workspace(_pack)
def _pack_bytes(call: OperatorCall) -> int:
    # Blocks of equal batch size live until all are joined.
    input_, lengths, batch_first = call.args
    known = find_value(lengths)
    assert known is not None  # else it has no result
    with torch._C.DisableTorchFunction(), torch.no_grad():
        steps = input_.transpose(0, 1) if batch_first else input_
        sizes = _iterate_blocks(_list_numbers(known))
        blocks = [steps[start:end, :batch] for start, end, batch in sizes]
        return sum(b.numel() * b.element_size() for b in blocks if not b.is_contiguous())


def _iterate_blocks(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields first step, last step (exclusive) and batch size of each block."""
    start = 0
    for index, end in enumerate(reversed(lengths)):
        if end > start:
            yield start, end, len(lengths) - index
            start = end


@ANY.function(torch._pad_packed_sequence)
def pad_packed_sequence(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """PackedSequence.cpp, ``_pad_packed_sequence``, operator by operator."""
    sizes = _list_numbers(batch_sizes)
    lengths = [sum(size > index for size in sizes) for index in range(sizes[0])]
    shape = (max(total_length, len(sizes)), sizes[0], *data.shape[1:])
    output = torch.full(shape, padding_value, dtype=data.dtype, device=data.device)
    offset = 0
    result = torch.empty(sizes[0], dtype=torch.int64)
    with _disable_current_modes():
        real_lengths = torch.tensor(lengths)
    remember_constant(result, real_lengths)
    for start, end, batch in _iterate_blocks(lengths):
        count = batch * (end - start)
        block = data[offset : offset + count].view(end - start, batch, *data.shape[1:])
        output[start:end][:, :batch].copy_(block)
        offset += count
    return output.transpose(0, 1) if batch_first else output, result


@ANY.function(torch.ctc_loss)
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    """aten/src/ATen/native/LossCTC.cpp, ``ctc_loss_impl``: lengths are numbers, or on the host.

    The mean divides by the lengths of the targets; PyTorch fills a tensor with them, which a fake
    one cannot be.
    """
    given = [_find_lengths(x) for x in (input_lengths, target_lengths)]
    if any(lengths is None for lengths in given):
        return torch.ctc_loss(
            log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity
        )
    inputs, outputs = map(_list_numbers, given)
    losses = torch.ctc_loss(log_probs, targets, inputs, outputs, blank, _NONE, zero_infinity)
    if reduction == _MEAN:
        return (losses / losses.new_empty(len(outputs)).clamp_min(1)).mean()
    return losses.sum() if reduction == _SUM else losses


def _find_lengths(lengths: Any) -> Any:
    """Finds lengths that are numbers, or on the host and known; None for others."""
    if not isinstance(lengths, Tensor):
        return lengths
    return None if is_on_gpu(lengths) else find_value(lengths)


def _list_numbers(lengths: Any) -> list[int]:
    with _disable_current_modes():
        return [int(length) for length in lengths]


@ANY.function(torch.istft, Tensor.istft)
def istft(*args: Any, **kwargs: Any) -> Tensor:
    """Lets the check pass that its windows add up to no zero."""
    with assume_passing(False):
        return torch.istft(*args, **kwargs)
