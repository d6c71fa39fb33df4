"""Reductions, running sums and order."""

from __future__ import annotations

import torch
from torch import Tensor

from saved_sets.row import Row, leaf

_X = (leaf(4, 6),)
_ROW = "4:float32"
_ALL = ":float32"
_INDICES = "4:int64"


def _total(*tensors: Tensor) -> Tensor:
    """The sum of all, so that each has a gradient; sums save sizes alone."""
    return sum((x.sum() for x in tensors[1:]), tensors[0].sum())


ROWS = (
    # sum, mean: sizes. nansum, var: self. prod, std, norms, logsumexp, amax: self and result.
    Row("sum", lambda x: x.sum(), _X, ()),
    Row("sum of rows", lambda x: x.sum(1), _X, ()),
    Row("mean", lambda x: x.mean(), _X, ()),
    Row("mean of rows", lambda x: x.mean(1), _X, ()),
    Row("nansum", lambda x: x.nansum(1), _X, ("input 0",)),
    Row("prod of rows", lambda x: x.prod(1), _X, ("input 0", _ROW)),
    Row("prod", lambda x: x.prod(), _X, ("input 0", _ALL)),
    Row("var", lambda x: x.var(1), _X, ("input 0",)),
    Row("std", lambda x: x.std(1), _X, ("input 0", _ROW)),
    Row("var and mean", lambda x: _total(*torch.var_mean(x, 1)), _X, ("input 0",)),
    Row("std and mean", lambda x: _total(*torch.std_mean(x, 1)), _X, ("input 0", _ROW)),
    Row("vector norm", lambda x: torch.linalg.vector_norm(x, 2, 1), _X, ("input 0", _ROW)),
    Row("norm", lambda x: x.norm(), _X, ("input 0", _ALL)),
    Row("norm, scalar", lambda x: torch.ops.aten.norm.Scalar(x, 2), _X, ("input 0", _ALL)),
    Row(
        "norm, dimension",
        lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, 2, [1]),
        _X,
        ("input 0", _ROW),
    ),
    # ScalarOpt_dim_dtype: self.to(grad.scalar_type()) of self.
    Row(
        "norm, dtype",
        lambda x: torch.ops.aten.norm.ScalarOpt_dim_dtype(x, 2, [1], False, dtype=torch.float64),
        _X,
        ("input 0", "4:float64"),
    ),
    Row("logsumexp", lambda x: x.logsumexp(1), _X, ("input 0", _ROW)),
    Row("amax", lambda x: x.amax(1), _X, ("input 0", _ROW)),
    Row("amin", lambda x: x.amin(1), _X, ("input 0", _ROW)),
    Row("aminmax", lambda x: _total(*x.aminmax(dim=1)), _X, ("input 0", _ROW, _ROW)),
    # value_selecting_reduction_backward: indices; evenly_distribute_backward: self and result.
    Row("max of rows", lambda x: x.max(1)[0], _X, (_INDICES,)),
    Row("min of rows", lambda x: x.min(1)[0], _X, (_INDICES,)),
    Row("max", lambda x: x.max(), _X, ("input 0", _ALL)),
    Row("min", lambda x: x.min(), _X, ("input 0", _ALL)),
    Row("median", lambda x: x.median(), _X, ("input 0", _ALL)),
    Row("nanmedian", lambda x: x.nanmedian(), _X, ("input 0", _ALL)),
    Row("median of rows", lambda x: x.median(1)[0], _X, (_INDICES,)),
    Row("nanmedian of rows", lambda x: x.nanmedian(1)[0], _X, (_INDICES,)),
    Row("kthvalue", lambda x: x.kthvalue(2, 1)[0], _X, (_INDICES,)),
    Row("sort", lambda x: x.sort()[0], _X, ("4x6:int64",)),
    Row("stable sort", lambda x: torch.sort(x, stable=True)[0], _X, ("4x6:int64",)),
    Row("topk", lambda x: x.topk(3)[0], _X, ("4x3:int64",)),
    # cumsum: nothing; cumprod, logcumsumexp: self and result; cummax: self and indices.
    Row("cumsum", lambda x: x.cumsum(1), _X, ()),
    Row("cumprod", lambda x: x.cumprod(1), _X, ("input 0", "4x6:float32")),
    Row("logcumsumexp", lambda x: x.logcumsumexp(1), _X, ("input 0", "4x6:float32")),
    Row("cummax", lambda x: x.cummax(1)[0], _X, ("input 0", "4x6:int64")),
    Row("cummin", lambda x: x.cummin(1)[0], _X, ("input 0", "4x6:int64")),
)
