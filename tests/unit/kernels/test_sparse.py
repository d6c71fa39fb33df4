"""Operators on sparse tensors: as many elements, and as much memory, as the CPU's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels import measure
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_map_only

from fxmem.errors import TraceError
from fxmem.kernels.sparse import estimate_sparse_workspace, is_on_sparse, run_on_sparse
from fxmem.tracing.fakes import make_fake_mode
from fxmem.tracing.known_values import attach_value
from fxmem.tracing.sparse_parts import find_parts, is_sparse
from fxmem.tracing.tensor_copier import TensorCopier

aten = torch.ops.aten
ROWS, WIDTH = 90, 6

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")


def rows(
    count: int = 40, every: int = 1, *, expanded: bool = False, coalesced: bool = False
) -> Tensor:
    """Rows of a matrix, as the gradient of an embedding has them; some are there twice."""
    indices = (torch.arange(count) * every % (count - 7)).view(1, -1)
    if coalesced:
        indices = indices.unique(dim=1)
    values = torch.ones(indices.shape[1], WIDTH)
    if expanded:
        values = torch.ones(1, 1).expand_as(values)
    size = (ROWS, WIDTH)
    return torch.sparse_coo_tensor(indices, values, size, is_coalesced=coalesced)


def matrix(coalesced: bool = False) -> Tensor:
    """Elements of a matrix, some of them twice."""
    indices = torch.stack([torch.arange(40) % 11, torch.arange(40) % 7])
    sparse = torch.sparse_coo_tensor(indices, torch.ones(40), (20, ROWS))
    return sparse.coalesce() if coalesced else sparse


def dense() -> Tensor:
    return torch.ones(ROWS, WIDTH)


def turned() -> Tensor:
    return torch.ones(WIDTH, ROWS).t()


CALLS: dict[str, tuple[Any, Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "clone": (aten.clone.default, lambda: (rows(),), {}),
    "clone expanded": (aten.clone.default, lambda: (rows(expanded=True),), {}),
    "copy": (aten.copy_.default, lambda: (rows(), rows(30)), {}),
    "zero": (aten.zero_.default, lambda: (rows(),), {}),
    "to dense": (aten._to_dense.default, lambda: (rows(),), {}),
    "coalesce": (aten._coalesce.default, lambda: (rows(),), {}),
    "coalesce expanded": (aten._coalesce.default, lambda: (rows(expanded=True),), {}),
    "coalesce elements": (aten._coalesce.default, lambda: (matrix(),), {}),
    "mask": (aten.sparse_mask.default, lambda: (dense(), rows(coalesced=True)), {}),
    "mask by what is there twice": (aten.sparse_mask.default, lambda: (dense(), rows()), {}),
    "add": (aten.add.Tensor, lambda: (rows(), rows()), {}),
    "add others": (aten.add.Tensor, lambda: (rows(), rows(30, 3)), {"alpha": 2}),
    "add coalesced": (
        aten.add.Tensor,
        lambda: (rows(coalesced=True), rows(30, coalesced=True)),
        {},
    ),
    "add expanded": (aten.add.Tensor, lambda: (rows(expanded=True), rows()), {}),
    "subtract expanded": (aten.sub.Tensor, lambda: (rows(), rows(expanded=True)), {}),
    "add in place": (aten.add_.Tensor, lambda: (rows(), rows(30, 3)), {}),
    "add to dense": (aten.add.Tensor, lambda: (dense(), rows()), {}),
    "add to dense in place": (aten.add_.Tensor, lambda: (dense(), rows()), {"alpha": -0.1}),
    "add expanded to dense": (aten.add_.Tensor, lambda: (dense(), rows(expanded=True)), {}),
    "add to turned": (aten.add_.Tensor, lambda: (turned(), rows()), {}),
    "add coalesced to turned": (aten.add_.Tensor, lambda: (turned(), rows(coalesced=True)), {}),
    "scale by a number": (aten.mul.Tensor, lambda: (rows(), 0.9), {}),
    "scale by a tensor": (aten.mul.Tensor, lambda: (rows(), torch.tensor(0.9)), {}),
    "scale in place": (aten.mul_.Tensor, lambda: (rows(coalesced=True), 0.9), {}),
    "negate": (aten.neg.default, lambda: (rows(),), {}),
    "multiply": (aten.mm.default, lambda: (matrix(), dense()), {}),
    "multiply coalesced": (aten.mm.default, lambda: (matrix(coalesced=True), dense()), {}),
    "add a product": (
        aten._sparse_addmm.default,
        lambda: (torch.ones(20, WIDTH), matrix(), dense()),
        {},
    ),
    "turn": (aten.t.default, lambda: (matrix(),), {}),
}


def bag_gradient(mode: int, padding: int) -> tuple[Any, ...]:
    """The arguments of a bag's backward after its forward."""
    weight, indices, offsets = dense(), torch.arange(60) % 50, torch.arange(0, 60, 10)
    out = aten._embedding_bag.default(
        weight, indices, offsets, False, mode, True, None, False, padding
    )
    settings = (ROWS, False, mode, True, None, padding)
    return (torch.ones(6, WIDTH), indices, offsets, *out[1:], *settings)


for _mode in (0, 1):
    for _padding in (-1, 3):
        CALLS[f"bags of mode {_mode} with padding {_padding}"] = (
            aten._embedding_bag_backward.default,
            lambda mode=_mode, padding=_padding: bag_gradient(mode, padding),
            {},
        )


def make_fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A fake that knows its indices, as a small integer input does."""
    fake = TensorCopier(mode).copy(tensor)
    if not (is_sparse(tensor) or tensor.is_floating_point()):
        attach_value(fake, tensor)
    return fake


def describe(tensor: Tensor) -> Any:
    """Shape, what it consists of, and the bytes that this takes."""
    if not is_sparse(tensor):
        return tuple(tensor.shape), tensor.dtype, tensor.untyped_storage().nbytes()
    parts = find_parts(tensor)
    return (
        tuple(tensor.shape),
        tensor.is_coalesced(),
        *(describe(part) for part in (parts.indices, parts.values)),
    )


def memory_of(*tensors: Any) -> dict[int, int]:
    """Storages and their bytes."""
    found = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            parts = find_parts(tensor) if is_sparse(tensor) else None
            for part in (parts.indices, parts.values) if parts else (tensor,):
                found[part.untyped_storage()._cdata] = part.untyped_storage().nbytes()
    return found


@pytest.mark.parametrize("name", CALLS)
def test_results_and_memory_are_those_of_the_kernel(name: str) -> None:
    func, make, kwargs = CALLS[name]
    mode, calls = make_fake_mode(), [make(), make()]
    fakes = tree_map_only(Tensor, lambda tensor: make_fake(mode, tensor), make())
    peak, real = measure(lambda: func(*calls.pop(), **kwargs))
    with mode:
        old = memory_of(*fakes)
        assert is_on_sparse(func, fakes, [fake for fake in fakes if isinstance(fake, Tensor)])
        workspace_bytes = estimate_sparse_workspace(func, fakes, kwargs)
        result = run_on_sparse(func, fakes, kwargs)
        new = {key: nbytes for key, nbytes in memory_of(result).items() if key not in old}
    assert isinstance(result, FakeTensor) and isinstance(real, Tensor)
    assert describe(result) == describe(real)
    assert workspace_bytes + sum(new.values()) == peak


def test_the_values_of_indices_go_on() -> None:
    mode, one, two = make_fake_mode(), rows(), rows(30, 3)
    with mode:
        added = run_on_sparse(aten.add.Tensor, (make_fake(mode, one), make_fake(mode, two)), {})
        made = run_on_sparse(aten._coalesce.default, (added,), {})
    assert made._nnz() == (one + two).coalesce()._nnz() < added._nnz()


def test_without_values_a_sum_is_only_known_to_be_no_larger() -> None:
    with make_fake_mode():
        ones = [
            torch.sparse_coo_tensor(torch.empty(1, 9, dtype=torch.int64), torch.empty(9), (ROWS,))
            for _ in range(2)
        ]
        added = run_on_sparse(aten.add.Tensor, tuple(ones), {})
        assert added._nnz() == 18
        for func in (aten.clone.default, aten._coalesce.default, aten.neg.default):
            with pytest.raises(DataDependentOutputException):
                run_on_sparse(func, (added,), {})


def test_another_operator_is_refused() -> None:
    mode, sparse = make_fake_mode(), rows()
    with mode:
        fake = make_fake(mode, sparse)
        with pytest.raises(TraceError, match=r"aten\.sin\.default of a sparse tensor is not"):
            run_on_sparse(aten.sin.default, (fake,), {})
        assert run_on_sparse(aten._nnz.default, (fake,), {}) == 40
