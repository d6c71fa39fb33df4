"""Sparse tensors (COO) that are fake: their indices and values, on fakes of the same storages.

The fake mode keeps both where a sparse tensor is made or detached, and loses them where an operator
makes another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._mode_utils import no_dispatch

from fxmem.errors import TraceError
from fxmem.fakes.values import attach_value, find_attached
from fxmem.versions.operators import aten

_INDICES = "_fxmem_indices"


def read_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Reads the indices and the values of a sparse tensor, coalesced or not.

    Returns:
        Indices of shape (sparse dimensions, nnz), and values of shape (nnz, dense dimensions).
    """
    with torch._C.DisableTorchFunction(), no_dispatch():
        indices, values = tensor._indices(), tensor._values()
    if isinstance(tensor, FakeTensor):
        mode, device = tensor.fake_mode, tensor.fake_device
        indices, values = FakeTensor(mode, indices, device), FakeTensor(mode, values, device)
        known = tensor.__dict__.get(_INDICES)
        if known is not None:
            attach_value(indices, known.real, known.memory, assumed=known.assumed)
    return indices, values


def raise_layout(tensor: Tensor) -> NoReturn:
    """Raises TraceError for a tensor that is neither dense nor of indices and values."""
    layout = str(tensor.layout).removeprefix("torch.")
    hint = "use a dense one, or torch.sparse_coo_tensor"
    raise TraceError(f"tensors of layout {layout} are not supported", hint=hint)


def make_sparse(
    indices: Tensor, values: Tensor, shape: Sequence[int], *, is_coalesced: bool = False
) -> Tensor:
    """Makes a fake sparse tensor on the storages of indices and values, in an active fake mode."""
    dims = len(indices), values.dim() - 1
    made: Tensor = aten._sparse_coo_tensor_with_dims_and_tensors.default(
        *dims,
        list(shape),
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=is_coalesced,
    )
    known = find_attached(indices)
    if known is not None and known.most is None:
        made.__dict__[_INDICES] = known
    return made


def assign_parts(tensor: FakeTensor, other: FakeTensor) -> None:
    """Gives a fake sparse tensor the shape of another one's parts; their storages are new."""
    with in_kernel_invocation_manager(tensor.fake_mode), no_dispatch():
        aten.copy_sparse_to_sparse_.default(tensor, other)
    tensor.__dict__.pop(_INDICES, None)
