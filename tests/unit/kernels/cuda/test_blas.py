"""Matrix products on CUDA, against ``cuBlasCommonArgs.h`` and ``Blas.cpp``."""

from __future__ import annotations

import torch
from cuda_steps import estimate, run_step, workspaces
from torch import nn

aten = torch.ops.aten


def test_matrices(gpu: None) -> None:
    x, y = torch.empty(8, 6), torch.empty(6, 4)
    assert estimate(aten.mm.default, x, y) == 0
    assert estimate(aten.mm.default, torch.empty(6, 8).t(), y) == 0
    assert estimate(aten.mm.default, torch.empty(8, 12)[:, :6], y) == 0  # gaps between rows
    assert estimate(aten.mm.default, torch.empty(8, 12)[:, ::2], y) == 192
    assert estimate(aten.mm.default, torch.empty(1).expand(8, 6), y) == 192
    assert estimate(aten.mm.default, torch.empty(6).expand(8, 6), y) == 192  # no leading dimension
    bias = torch.empty(4)
    assert estimate(aten.addmm.default, bias, x, torch.empty(1).expand(6, 4)) == 96


def test_batches(gpu: None) -> None:
    x, y = torch.empty(2, 8, 6), torch.empty(2, 6, 4)
    assert estimate(aten.bmm.default, x, y.transpose(1, 2).contiguous().transpose(1, 2)) == 0
    assert estimate(aten.bmm.default, torch.empty(8, 6).expand(2, 8, 6), y) == 0
    heads = torch.empty(2, 8, 2, 6).transpose(1, 2)[:, 0]  # (2, 8, 6) of rows that are 12 apart
    assert estimate(aten.bmm.default, heads, y) == 0
    assert estimate(aten.bmm.default, torch.empty(2, 8, 12)[:, :, ::2], y) == 384
    assert estimate(aten.bmm.default, torch.empty(2, 1, 6).expand(2, 8, 6), y) == 384
    added = torch.empty(4).expand(2, 8, 4)
    assert estimate(aten.baddbmm.default, added, x, y) == 0  # into the result


def test_vectors(gpu: None) -> None:
    matrix, vector = torch.empty(8, 6), torch.empty(6)
    assert estimate(aten.mv.default, matrix, vector[:1].expand(6)) == 24
    assert estimate(aten.mv.default, torch.empty(8, 12)[:, ::2], vector) == 192
    assert estimate(aten.addmv.default, torch.empty(8), matrix, vector) == 0


def test_the_gradient_of_a_sum_is_copied_for_each_product() -> None:
    graph = run_step(nn.Linear(6, 4, bias=False), torch.zeros(8, 6, requires_grad=True))
    found = [o.workspace_bytes for o in graph.operations if o.name == "aten.mm.default"]
    # Forward nothing; backward, for input and weight, 8 x 4 elements that are one.
    assert found == [0, 128, 128]
    dense = run_step(nn.Sequential(nn.Linear(6, 4, bias=False), nn.ReLU()), torch.zeros(8, 6))
    assert workspaces(dense) == {}
