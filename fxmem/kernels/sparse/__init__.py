"""Operators on sparse tensors in coordinate format, as gradients of embeddings are.

PyTorch's fake kernels give results without elements. These give results with as many as the CPU's
kernels do (aten/src/ATen/native/sparse/SparseTensor.cpp and SparseTensorMath.cpp), and say what
those hold while they run. An operator that is not here is refused: what it would be told to
allocate would be wrong.
"""

from __future__ import annotations

from fxmem.kernels.sparse import (  # noqa: F401 - for what they register
    arithmetic,
    bags,
    coalescing,
    making,
    products,
)
from fxmem.kernels.sparse.coalescing import coalesce
from fxmem.kernels.sparse.registry import (
    estimate_sparse_workspace,
    is_on_sparse,
    run_on_sparse,
)

__all__ = ["coalesce", "estimate_sparse_workspace", "is_on_sparse", "run_on_sparse"]
