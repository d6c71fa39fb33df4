"""Reductions on the CPU: partial results per thread, and means as sum and division."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fxmem.lowering.cpu_registry import Arguments, tensor, workspace
from fxmem.lowering.cpu_tape import Tape, size_bytes

_aten = torch.ops.aten

# at::internal::GRAIN_SIZE (aten/src/ATen/TensorIterator.h): less is not shared among threads.
_GRAIN_SIZE = 32768
# A Python number becomes a tensor of 8 bytes (c10/core/Scalar.h, ``wrapped_scalar_tensor``).
_SCALAR_BYTES = 8


def two_pass_bytes(elements: int, results: int, itemsize: int) -> int:
    """aten/src/ATen/native/TensorIteratorReduce.cpp, ``two_pass_reduction``.

    A full reduction keeps one partial result per thread.
    """
    threads = torch.get_num_threads()
    if results != 1 or elements < _GRAIN_SIZE or threads == 1:
        return 0
    return threads * itemsize


@workspace(_aten.sum.default, _aten.sum.dim_IntList)
def _sum(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/ReduceOps.cpp, ``sum_out``; integers are cast on the way."""
    x, out = tensor(args[0]), tensor(outputs)
    return two_pass_bytes(x.numel(), out.numel(), out.element_size())


@workspace(_aten.mean.default, _aten.mean.dim)
def _mean(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """ReduceOps.cpp, ``mean_kernel_impl`` by ``sum_out(...).div_(count)``.

    Reduced types are summed in a float copy, whose float mean is cast back.
    """
    x, out = tensor(args[0]), tensor(outputs)
    tape = Tape()
    if x.dtype in (torch.float16, torch.bfloat16):
        tape.allocate(out.numel() * 4)
        tape.free(tape.allocate(x.numel() * 4))
    tape.free(tape.allocate(two_pass_bytes(x.numel(), out.numel(), out.element_size())))
    tape.allocate(_SCALAR_BYTES + max(4, out.element_size()))
    return tape.peak_bytes


@workspace(_aten.logsumexp.default)
def _logsumexp(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """ReduceOps.cpp, ``logsumexp_out_impl``: the shifted exponentials and their sum."""
    return size_bytes(tensor(args[0])) + size_bytes(tensor(outputs))
