"""The workspaces of cuBLAS and cuBLASLt: how large, from which call on, in which thread."""

from __future__ import annotations

import pytest
from torch import nn

from fxmem import analyze
from fxmem.graph import Category
from fxmem.lowering.cuda.cublas import cublas_workspace_bytes, cublaslt_workspace_bytes
from fxmem.lowering.cuda.target import Gpu, use_gpu

AMPERE = 2 * 4096 * 1024 + 8 * 16 * 1024
"""The default of cuBLAS before Hopper, ``:4096:2:16:8``; 8519680 in the allocator's traces."""
LT = 1 << 20


@pytest.mark.parametrize(
    ("capability", "nbytes"), [((7, 5), AMPERE), ((8, 9), AMPERE), ((9, 0), 32 << 20)]
)
def test_the_default_follows_the_architecture(capability: tuple[int, int], nbytes: int) -> None:
    with use_gpu(Gpu(capability=capability)):
        assert cublas_workspace_bytes() == nbytes


def test_the_environment_overrides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "2048")
    assert cublas_workspace_bytes() == 32 << 20
    assert cublaslt_workspace_bytes() == 2 << 20


def kept(model: nn.Module, spec: str, mode: str = "train") -> list[tuple[str, int]]:
    """The workspaces that a step finds."""
    graph = analyze(model, (spec,), device="cuda", mode=mode).graph
    found = [s for s in graph.storages if s.category is Category.WORKSPACE]
    assert all(storage.died is None for storage in found)
    return [(storage.name, storage.nbytes) for storage in found]


def test_backward_has_a_handle_of_its_own() -> None:
    # forward: addmm with a bias, by cuBLASLt; backward: mm.
    assert kept(nn.Linear(8, 4), "16x8") == [
        ("cuBLAS workspace", AMPERE),
        ("cuBLASLt workspace", LT),
        ("cuBLAS workspace", AMPERE),
    ]


def test_inference_has_no_backward() -> None:
    assert kept(nn.Linear(8, 4, bias=False), "16x8", "infer") == [("cuBLAS workspace", AMPERE)]


def test_a_single_output_does_not_go_to_cublaslt() -> None:
    assert kept(nn.Linear(8, 1), "16x8", "infer") == [("cuBLAS workspace", AMPERE)]


def test_what_multiplies_nothing_keeps_nothing() -> None:
    assert kept(nn.ReLU(), "16x8", "infer") == []
