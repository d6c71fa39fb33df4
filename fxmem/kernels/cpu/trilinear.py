"""Bilinear layers on the CPU: products of three tensors, slice by slice.

Source: ``aten/src/ATen/native/Linear.cpp``, ``_trilinear`` and ``sumproduct_pair``. Each slice is
a product of the first two tensors and then one with the third, both as ``bmm`` of operands whose
dimensions were permuted and joined: where that takes a copy follows from the strides, which
tensors without memory have too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from fxmem.kernels.arguments import argument, new_bytes, tensor
from fxmem.kernels.cpu.linear import batched_bytes
from fxmem.kernels.cpu.target import CPU
from fxmem.kernels.tape import Tape, size_bytes
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten


def _is_same(x: Tensor, y: Tensor) -> bool:
    return bool(x.untyped_storage()._cdata == y.untyped_storage()._cdata)


class _Slice:
    """The allocations of one slice."""

    def __init__(self) -> None:
        self.tape = Tape()

    def _own(self, result: Tensor, source: Tensor) -> tuple[Tensor, int]:
        """A result, and the bytes that it took."""
        return result, 0 if _is_same(result, source) else self.tape.allocate(size_bytes(result))

    def multiply(self, left: Tensor, right: Tensor, summed: Collection[int]) -> Tensor:
        """``sumproduct_pair`` with all dimensions kept."""
        held = []
        operands = [left, right]
        for dim in sorted(summed):
            for i, other in ((0, 1), (1, 0)):
                if operands[i].shape[dim] > 1 and operands[other].shape[dim] == 1:
                    operands[i], taken = self._own(operands[i].sum(dim, True), operands[i])
                    held.append(taken)
        left, right = operands
        both, only_left, only_right, inner = _classify(left, right, summed)
        joined = [
            self._own(x.permute(order).reshape([math.prod(map(x.size, g)) for g in groups]), x)
            for x, groups in ((left, (both, only_left, inner)), (right, (both, inner, only_right)))
            for order in [[*groups[0], *groups[1], *groups[2], *_rest(x, groups)]]
        ]
        (first, first_bytes), (second, second_bytes) = joined
        product = torch.bmm(first, second)
        self.tape.allocate(size_bytes(product))
        self.tape.free(self.tape.allocate(batched_bytes(first, second)))
        self.tape.free(first_bytes, second_bytes, *held)
        order = [*both, *only_left, *inner, *only_right]
        order += [dim for dim in range(left.dim()) if dim not in order]
        sizes = [1 if dim in summed else max(left.size(dim), right.size(dim)) for dim in order]
        places = [order.index(dim) for dim in range(left.dim())]
        return product.view(sizes).permute(places)


def _rest(x: Tensor, groups: Sequence[Sequence[int]]) -> list[int]:
    """Dimensions of size one that no group has."""
    named = {dim for group in groups for dim in group}
    return [dim for dim in range(x.dim()) if dim not in named]


def _classify(
    left: Tensor, right: Tensor, summed: Collection[int]
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Dimensions that both keep, that only one has, and that are summed over."""
    both: list[int] = []
    only_left: list[int] = []
    only_right: list[int] = []
    inner: list[int] = []
    for dim in range(left.dim()):
        has_left, has_right = left.shape[dim] > 1, right.shape[dim] > 1
        if dim in summed:
            if has_left and has_right:
                inner.append(dim)
        elif has_left and has_right:
            both.append(dim)
        elif has_left:
            only_left.append(dim)
        else:
            only_right.append(dim)
    return both, only_left, only_right, inner


def _without_memory(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


@CPU.workspace(_aten._trilinear.default)
def _trilinear(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Linear.cpp, ``_trilinear``; slices are freed before the next is made."""
    found = argument(args, kwargs, 7, "unroll_dim")
    unrolled = found if isinstance(found, int) else 1
    expanded, summed = [_dims(value) for value in args[3:6]], _dims(args[6])
    with torch._C._DisableTorchDispatch():
        factors = [_without_memory(tensor(value)) for value in args[:3]]
        for i, dims in enumerate(expanded):
            for dim in dims:
                factors[i] = factors[i].unsqueeze(dim)
        first, second, third = (x.narrow(unrolled, 0, 1) for x in factors)
        inner = summed - {unrolled}
        run = _Slice()
        run.tape.allocate(new_bytes(outputs))
        pair = run.multiply(first, second, inner & expanded[2])
        run.multiply(pair, third, inner - expanded[2])
    return run.tape.peak_bytes - new_bytes(outputs)


def _dims(value: object) -> set[int]:
    assert isinstance(value, (list, tuple))
    return {int(dim) for dim in value}
