"""mamba_ssm's compiled scan; the rest of the package is Python and Triton.

Source: https://github.com/state-spaces/mamba, 2.3.2: ``csrc/selective_scan/selective_scan.cpp``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxmem.kernels.stand_ins import register_stand_in

_CHUNK = 2048


def fwd(u: Tensor, delta: Tensor, a: Tensor, *more: Any) -> list[Tensor]:
    """``selective_scan_fwd``: the result, states between chunks, the gated result if there is z."""
    z = more[3]
    gated = () if z is None else (torch.empty_like(z),)
    out = torch.empty_like(delta)
    batch, dim, length = u.shape
    states = u.new_empty(batch, dim, -(-length // _CHUNK), 2 * a.shape[1], dtype=a.dtype)
    return [out, states, *gated]


def bwd(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, *more: Any) -> list[Any]:
    """``selective_scan_bwd``: gradients of B and C that vary in time are summed in float."""
    d, z, bias, _gradient, _states, out, dz, _softplus, recompute_out_z = more
    gated: list[Tensor] = []
    if z is not None:
        gated.append(torch.empty_like(z) if dz is None else dz)
        if recompute_out_z:
            gated.append(torch.empty_like(out))
    made = [torch.empty_like(u), torch.empty_like(delta), torch.zeros_like(a)]
    sums = [torch.zeros_like(x, dtype=torch.float32 if x.dim() >= 3 else x.dtype) for x in (b, c)]
    others = [None if x is None else torch.zeros_like(x) for x in (d, bias)]
    return [*made, *(x.to(b.dtype) for x in sums), *others, *gated]


register_stand_in("selective_scan_cuda", {"fwd": fwd, "bwd": bwd})
