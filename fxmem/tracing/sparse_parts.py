"""What a sparse tensor in coordinate format consists of: indices and values.

A sparse tensor has no storage of its own. PyTorch's fake kernels forget how many elements are
there, so a fake one keeps the fake tensors that it was made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

_PARTS = "_fxmem_parts"
_make = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors that a sparse one consists of.

    Attributes:
        indices: Sparse dimensions x elements, int64.
        values: Elements x dense dimensions.
        is_exact: Whether the values of the indices do not decide how many elements there are:
            merging equal ones would leave fewer.
    """

    indices: Tensor
    values: Tensor
    is_exact: bool = True


def is_sparse(tensor: Tensor) -> bool:
    """Whether a tensor is sparse, in coordinate format."""
    return tensor.layout is torch.sparse_coo


def find_parts(tensor: Tensor) -> Parts:
    """The indices and values of a sparse tensor."""
    parts: Parts | None = vars(tensor).get(_PARTS)
    if parts is not None:
        return parts
    if isinstance(tensor, FakeTensor):
        return Parts(tensor._indices(), tensor._values())
    with no_dispatch():
        return Parts(tensor._indices(), tensor._values())


def make_sparse(parts: Parts, size: Sequence[int], *, is_coalesced: bool) -> Tensor:
    """The fake sparse tensor that consists of these fake tensors."""
    sparse_dims = parts.indices.shape[0]
    sparse: Tensor = _make(
        sparse_dims,
        len(size) - sparse_dims,
        list(size),
        parts.indices,
        parts.values,
        dtype=parts.values.dtype,
        layout=torch.sparse_coo,
        device=parts.values.device,
        is_coalesced=is_coalesced,
    )
    vars(sparse)[_PARTS] = parts
    return sparse


def replace_parts(sparse: Tensor, new: Tensor) -> Tensor:
    """Gives a fake sparse tensor the indices and values of another, as operators in place do."""
    guard = torch._C._DisableTorchDispatch()
    try:
        sparse.data = new
    finally:
        del guard
    vars(sparse)[_PARTS] = find_parts(new)
    return sparse
