"""Differences between releases of torch, each tried under the releases on either side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend

from fxmem import analyze
from fxmem.graph import Category
from fxmem.kernels.cuda import gpu as gpus
from fxmem.kernels.cuda.attention.backends import read_settings
from fxmem.kernels.cuda.gpu import Gpu
from fxmem.kernels.cuda.linear import cublas_workspace_bytes
from fxmem.versions import release
from fxmem.versions.release import Release, is_release

MIB = 2**20
CUBLAS = ("cuBLAS workspace", 8519680)
LT = ("cuBLASLt workspace", MIB)
HOPPER, BLACKWELL = (9, 0), (10, 0)


def install(monkeypatch: pytest.MonkeyPatch, installed: Release) -> None:
    monkeypatch.setattr(release, "INSTALLED", installed)


def list_kept(model: nn.Module, shape: str) -> list[tuple[str, int]]:
    graph = analyze(model, shape, device="cuda", mode="infer").graph
    found = [s for s in graph.storages if s.category is Category.WORKSPACE and s.died is None]
    return [(s.name, s.nbytes) for s in found]


@pytest.mark.parametrize(
    ("installed", "kept", "added_bytes"),
    [
        ((2, 8), [CUBLAS], MIB),  # while it runs
        ((2, 9), [CUBLAS, LT], MIB),
        ((2, 11), [CUBLAS, LT], MIB),
        ((2, 12), [CUBLAS], 0),
    ],
)
def test_cublaslt_has_a_workspace_of_its_own_until_2_11(
    monkeypatch: pytest.MonkeyPatch,
    installed: Release,
    kept: list[tuple[str, int]],
    added_bytes: int,
) -> None:
    layer = nn.Linear(8, 4)
    install(monkeypatch, (2, 12))
    plain_bytes = analyze(layer, "16x8", mode="infer").peak_bytes
    install(monkeypatch, installed)
    assert list_kept(layer, "16x8") == kept
    assert analyze(layer, "16x8", mode="infer").peak_bytes == plain_bytes + added_bytes
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1")
    assert analyze(layer, "16x8", mode="infer").peak_bytes == plain_bytes


@pytest.mark.parametrize(
    ("model", "returned_bytes"),
    [
        (nn.Linear(8, 4), MIB),
        (nn.Linear(8, 4, bias=False), CUBLAS[1]),
        (nn.Linear(8, 1), CUBLAS[1]),
    ],
)
def test_calls_give_their_workspaces_back_from_2_15(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, returned_bytes: int
) -> None:
    def measure_peak(installed: Release) -> int:
        install(monkeypatch, installed)
        return analyze(model, "16x8", device="cuda", mode="infer").peak_bytes

    kept_bytes = measure_peak((2, 14))
    assert measure_peak((2, 15)) == kept_bytes - CUBLAS[1] + returned_bytes
    assert not list_kept(model, "16x8")
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    assert measure_peak((2, 15)) == kept_bytes


@pytest.mark.parametrize(
    ("model", "shape", "is_served"),
    [
        (nn.Linear(8, 4), "2x16x8", True),
        (nn.Linear(8, 4, bias=False), "16x8", False),
        (nn.Linear(8, 1), "16x8", False),
        (nn.Linear(1, 4), "16x1", False),
        (nn.Linear(8, 4), "1x8", False),
    ],
)
def test_cublaslt_adds_biases_of_one_dimension(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, shape: str, is_served: bool
) -> None:
    install(monkeypatch, (2, 11))
    assert (LT in list_kept(model, shape)) is is_served


def test_one_row_is_served_until_2_9(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, (2, 9))
    assert LT in list_kept(nn.Linear(8, 4), "1x8")


def test_the_user_sets_the_size_of_cublaslts_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, (2, 11))
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "4096")
    assert list_kept(nn.Linear(8, 4), "16x8")[1] == ("cuBLASLt workspace", 4 * MIB)


def test_blackwell_has_hoppers_cublas_workspace_from_2_12(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {}
    for installed in ((2, 11), (2, 12)):
        install(monkeypatch, installed)
        for capability in (HOPPER, BLACKWELL):
            with gpus.use_gpu(Gpu(capability)):
                sizes[installed, capability] = cublas_workspace_bytes()
    assert sizes == {
        ((2, 11), HOPPER): 32 * MIB,
        ((2, 11), BLACKWELL): 8519680,
        ((2, 12), HOPPER): 32 * MIB,
        ((2, 12), BLACKWELL): 32 * MIB,
    }


@pytest.mark.skipif(is_release(before=(2, 9)), reason="these releases have an order of their own")
@pytest.mark.parametrize(
    ("installed", "capability", "is_first"),
    [
        ((2, 8), HOPPER, False),
        ((2, 9), HOPPER, True),
        ((2, 9), BLACKWELL, True),
        ((2, 9), (10, 3), False),
        ((2, 9), (8, 0), False),
        ((2, 10), HOPPER, False),  # its wheels have cuDNN 9.10.2
        ((2, 11), HOPPER, True),
    ],
)
def test_cudnn_comes_first_in_attention_by_release(
    monkeypatch: pytest.MonkeyPatch,
    installed: Release,
    capability: tuple[int, int],
    is_first: bool,
) -> None:
    install(monkeypatch, installed)
    monkeypatch.setattr(torch.version, "cuda", None)  # a CUDA build says its own cuDNN
    order = read_settings(Gpu(capability)).order
    assert (order[0] is SDPBackend.CUDNN_ATTENTION) is is_first
    monkeypatch.setenv("TORCH_CUDNN_SDPA_PREFERRED", "0")
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert read_settings(Gpu(capability)).order[0] is SDPBackend.FLASH_ATTENTION


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_keeps_casts_in_inference_mode_until_2_10(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)), nn.ReLU())

    def find_peak(**options: Any) -> int:
        shape = {"mode": "infer", "device": device, "autocast": "bf16"}
        return analyze(model, "64x64", **shape, **options).peak_bytes

    install(monkeypatch, (2, 10))
    kept_bytes = find_peak()
    assert find_peak(inference_mode=True) == kept_bytes
    install(monkeypatch, (2, 11))
    assert find_peak(inference_mode=True) < find_peak() == kept_bytes
