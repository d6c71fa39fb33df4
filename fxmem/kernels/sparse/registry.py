"""Which operators on sparse tensors are modelled, and what each does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxmem.errors import TraceError
from fxmem.tracing.sparse_parts import is_sparse

_aten = torch.ops.aten
CONSTRUCT = _aten._sparse_coo_tensor_with_dims_and_tensors.default
BAG_BACKWARD = _aten._embedding_bag_backward.default
_MAKERS = (CONSTRUCT, BAG_BACKWARD)
_BAG_SPARSE = 9  # the position of its argument
INDEX_BYTES = 8
"""Of an index."""

_Kernel = Callable[..., Any]
_Estimator = Callable[..., int]
_KERNELS: dict[Any, _Kernel] = {}
_WORKSPACES: dict[Any, _Estimator] = {}
_QUESTIONS = frozenset(
    {
        _aten.is_coalesced.default,
        _aten.sparse_dim.default,
        _aten.dense_dim.default,
        _aten._nnz.default,
        _aten._dimI.default,
        _aten._dimV.default,
        _aten.is_same_size.default,
    }
)
"""What fake kernels answer as real ones do."""


def kernel(*operators: Any) -> Callable[[_Kernel], _Kernel]:
    """Registers what gives the results of these operators; NotImplemented to refuse them."""

    def register(kernel: _Kernel) -> _Kernel:
        _KERNELS.update(dict.fromkeys(operators, kernel))
        return kernel

    return register


def workspace(*operators: Any) -> Callable[[_Estimator], _Estimator]:
    """Registers what states the bytes that these operators' kernels hold beside their results."""

    def register(estimate: _Estimator) -> _Estimator:
        _WORKSPACES.update(dict.fromkeys(operators, estimate))
        return estimate

    return register


def is_on_sparse(func: Any, args: tuple[Any, ...], tensors: Sequence[Tensor]) -> bool:
    """Whether an operator makes a sparse tensor or reads one.

    Args:
        func: The operator.
        args: Its positional arguments.
        tensors: The tensors among all of its arguments.
    """
    if func in _MAKERS:
        return func is not BAG_BACKWARD or args[_BAG_SPARSE] is True
    return any(map(is_sparse, tensors))


def run_on_sparse(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operator on fake sparse tensors.

    Raises:
        TraceError: It is not modelled.
        DataDependentOutputException: How many elements there are depends on values.
    """
    if func in _QUESTIONS:
        return func(*args, **kwargs)
    result = _KERNELS[func](*args, **kwargs) if func in _KERNELS else NotImplemented
    if result is NotImplemented:
        raise TraceError(
            f"{func} of a sparse tensor is not modelled",
            hint="sparse=False, or dense tensors, tell an upper bound",
        )
    return result


def estimate_sparse_workspace(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Bytes that the kernel holds beside its results; to be asked before it runs."""
    return _WORKSPACES[func](*args, **kwargs) if func in _WORKSPACES else 0
