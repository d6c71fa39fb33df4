"""Solvers' results have the shapes and strides that those of real kernels have."""

from __future__ import annotations

import pytest
import torch

import fxmem


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((4, 50, 8), (4, 50, 3)),  # as pykan solves for splines
        ((8, 50), (8, 3)),
        ((4, 50, 8), (4, 50)),
        ((1, 50, 8), (2, 50, 3)),
    ],
)
def test_least_squares(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    real = torch.linalg.lstsq(torch.rand(a), torch.rand(b))
    with fxmem.record(device="cpu"):
        made = torch.linalg.lstsq(torch.rand(a), torch.rand(b))
        layouts = [(tuple(each.shape), each.stride()) for each in made]
        nbytes = made.solution.untyped_storage().nbytes()
    assert layouts == [(tuple(each.shape), each.stride()) for each in real]
    assert nbytes == real.solution.untyped_storage().nbytes()


def test_a_gpu_finds_no_rank() -> None:
    with fxmem.record(gpu="h100"):
        made = torch.linalg.lstsq(torch.rand(4, 50, 8).cuda(), torch.rand(4, 50, 3).cuda())
        assert [tuple(each.shape) for each in made] == [(4, 8, 3), (4, 3), (0,), (0,)]
