"""Causal attention of PyTorch by backend, forwards in half precision without gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxmem
from benchmarks.published.cases import Case
from benchmarks.published.predicting import list_peaks

BACKENDS = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}
BATCH, HEADS, WIDTH = 1, 8, 64


class Loop(nn.Module):
    """Attention twice over; the loop's variable has the name of the output, which it frees."""

    def __init__(self, backend: SDPBackend) -> None:
        super().__init__()
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Two of the sixty calls, after a short one of the backend that ran before."""
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(q[:, :, :8], k[:, :, :8], v[:, :, :8], is_causal=True)
        with sdpa_kernel(self.backend):
            for _ in range(2):
                F.scaled_dot_product_attention(q, k, v, is_causal=True)


def predict(case: Case) -> dict[str, int]:
    """The peak of a process in which the math backend has run before."""
    spec = fxmem.TensorSpec((BATCH, HEADS, case.config["length"], WIDTH), "float16")
    with torch.device("meta"):
        loop = Loop(BACKENDS[case.config["backend"]])
    analysis = fxmem.analyze(loop, (spec, spec, spec), mode="infer", gpu=case.gpu, alloc_conf="")
    return {"allocated": list_peaks(analysis)["allocated"]}
