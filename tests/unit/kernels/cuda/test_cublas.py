"""The workspaces of cuBLAS: how large, from which call on, in which thread."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxmem import analyze
from fxmem.graph import Category
from fxmem.kernels.cuda.gpu import Gpu, use_gpu
from fxmem.kernels.cuda.linear import cublas_workspace_bytes

AMPERE = 2 * 4096 * 1024 + 8 * 16 * 1024
"""The default of cuBLAS before Hopper, ``:4096:2:16:8``; 8519680 in the allocator's traces."""


@pytest.mark.parametrize(
    ("capability", "nbytes"), [((7, 5), AMPERE), ((8, 9), AMPERE), ((9, 0), 32 << 20)]
)
def test_the_default_follows_the_architecture(capability: tuple[int, int], nbytes: int) -> None:
    with use_gpu(Gpu(capability=capability)):
        assert cublas_workspace_bytes() == nbytes


def test_the_environment_overrides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert cublas_workspace_bytes() == 32 << 20


def kept(model: nn.Module, spec: str, mode: str = "train") -> list[tuple[str, int]]:
    """The workspaces that a step finds."""
    graph = analyze(model, (spec,), device="cuda", mode=mode).graph
    found = [s for s in graph.storages if s.category is Category.WORKSPACE]
    assert all(storage.died is None for storage in found)
    return [(storage.name, storage.nbytes) for storage in found]


def test_backward_has_a_handle_of_its_own() -> None:
    # forward: addmm with a bias, by cuBLASLt in the workspace of cuBLAS; backward: mm.
    assert kept(nn.Linear(8, 4), "16x8") == [("cuBLAS workspace", AMPERE)] * 2


def test_inference_has_no_backward() -> None:
    assert kept(nn.Linear(8, 4, bias=False), "16x8", "infer") == [("cuBLAS workspace", AMPERE)]


def test_what_multiplies_nothing_keeps_nothing() -> None:
    assert kept(nn.ReLU(), "16x8", "infer") == []


class Forces(nn.Module):
    """An interatomic potential, as in SchNetPack: forces are the gradient of the energy."""

    def __init__(self, multithreaded: bool = True) -> None:
        super().__init__()
        self.energy = nn.Linear(8, 8, bias=False)
        self.multithreaded = multithreaded

    def forward(self, positions: Tensor) -> Tensor:
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(self.multithreaded):
            energy = self.energy(positions.requires_grad_()).square().sum()
            (gradient,) = torch.autograd.grad(energy, positions, create_graph=self.training)
        return -gradient


def test_a_backward_inside_forward_runs_in_the_thread_of_the_engine() -> None:
    assert kept(Forces(), "16x8", "infer") == [("cuBLAS workspace", AMPERE)] * 2


def test_without_multithreading_the_engine_runs_in_the_thread_of_the_caller() -> None:
    assert kept(Forces(multithreaded=False), "16x8", "infer") == [("cuBLAS workspace", AMPERE)]
