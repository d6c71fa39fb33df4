"""Attention written out, whose backward runs again and again on one graph.

As xformers' benchmark of its memory-efficient attention compares with.
"""

from __future__ import annotations

import os
from unittest import mock

import torch
from torch import Tensor, nn

import fxmem
from benchmarks.published.cases import Case
from benchmarks.published.predicting import list_peaks


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Scaled dot products, softmax, and their product with the values."""
    query = query * (1.0 / query.shape[-1] ** 0.5)
    return (query @ key.transpose(-2, -1)).softmax(-1) @ value


class Backward(nn.Module):
    """Two backward calls of those that the benchmark times, with the tensors that it holds."""

    def forward(self, query: Tensor, *results: Tensor) -> None:
        """From one tensor that is query, key and value; ``results`` are those of the check."""
        with torch.enable_grad():
            query = query.requires_grad_()
            output = attend(query, query, query)
            gradient = torch.ones_like(query)
            for _ in range(2):
                output.backward(gradient, retain_graph=True)


def predict(case: Case) -> dict[str, int]:
    """The peak while backward runs, without cuBLAS workspaces, as torch was then."""
    shape = case.config["batch"], case.config["tokens"], case.config["width"]
    spec = fxmem.TensorSpec(shape, "float32")
    with mock.patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":0:0"):
        analysis = fxmem.analyze(
            f"{__name__}:Backward",
            (spec,) * 3,
            mode="infer",
            gpu=case.gpu,
            alloc_conf="",
        )
    return {"allocated in backward": list_peaks(analysis)["allocated"]}
