"""Matrix products on CUDA: copies of operands, cuBLAS's workspaces, and experts' products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_steps import make_buffers_test, on_gpu, run_kernel, run_step, workspaces
from running import Runs
from torch import Tensor, nn

from fxmem import analyze
from fxmem.graph import Category
from fxmem.kernels.cuda.gpu import Gpu, use_gpu
from fxmem.kernels.cuda.linear import cublas_workspace_bytes

aten = torch.ops.aten
empty = torch.empty
AMPERE = 2 * 4096 * 1024 + 8 * 16 * 1024
"""The default of cuBLAS before Hopper, ``:4096:2:16:8``; 8519680 in the allocator's traces."""
HOPPER = 32 << 20


def batch() -> Tensor:
    return empty(2, 6, 4)


BUFFERS = [
    # cuBlasCommonArgs.h, prepare_matrix_for_cublas: gaps between rows, but no others.
    ("mm", lambda: (empty(8, 6), empty(6, 4)), 0),
    ("mm", lambda: (empty(6, 8).t(), empty(6, 4)), 0),
    ("mm", lambda: (empty(8, 12)[:, :6], empty(6, 4)), 0),
    ("mm", lambda: (empty(8, 12)[:, ::2], empty(6, 4)), 192),
    ("mm", lambda: (empty(1).expand(8, 6), empty(6, 4)), 192),
    ("mm", lambda: (empty(6).expand(8, 6), empty(6, 4)), 192),  # no leading dimension
    ("addmm", lambda: (empty(4), empty(8, 6), empty(1).expand(6, 4)), 96),
    # prepare_batch_matrix_for_cublas: an expanded batch, and rows that are 12 apart.
    ("bmm", lambda: (empty(2, 8, 6), empty(2, 4, 6).mT), 0),
    ("bmm", lambda: (empty(8, 6).expand(2, 8, 6), batch()), 0),
    ("bmm", lambda: (empty(2, 8, 2, 6).transpose(1, 2)[:, 0], batch()), 0),
    ("bmm", lambda: (empty(2, 8, 12)[:, :, ::2], batch()), 384),
    ("bmm", lambda: (empty(2, 1, 6).expand(2, 8, 6), batch()), 384),
    ("baddbmm", lambda: (empty(4).expand(2, 8, 4), empty(2, 8, 6), batch()), 0),
    # Blas.cpp, addmv_out_cuda.
    ("mv", lambda: (empty(8, 6), empty(1).expand(6)), 24),
    ("mv", lambda: (empty(8, 12)[:, ::2], empty(6)), 192),
    ("addmv", lambda: (empty(8), empty(8, 6), empty(6)), 0),
]
test_buffers = make_buffers_test(BUFFERS)


def test_the_gradient_of_a_sum_is_copied_for_each_product() -> None:
    graph = run_step(nn.Linear(6, 4, bias=False), torch.zeros(8, 6, requires_grad=True))
    found = [o.workspace_bytes for o in graph.operations if o.name == "aten.mm.default"]
    # Forward nothing; backward, for input and weight, 8 x 4 elements that are one.
    assert found == [0, 128, 128]
    dense = run_step(nn.Sequential(nn.Linear(6, 4, bias=False), nn.ReLU()), torch.zeros(8, 6))
    assert workspaces(dense) == {}


class _InFloat(torch.autograd.Function):
    """A product of halves in float32, as Megatron-LM accumulates gradients of weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Any:
        rows = x[None, :, ::2]
        one = torch.mm(rows[0], weight, out_dtype=torch.float32)
        two = torch.baddbmm(one[None], rows, weight[None], out_dtype=torch.float32)
        return torch.addmm(two[0], rows[0], weight, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, gradient.to(torch.bfloat16)


@pytest.mark.skipif(not hasattr(aten.mm, "dtype"), reason="out_dtype= came with torch 2.8")
def test_products_with_an_out_dtype_run_the_kernels_of_those_without() -> None:
    weight = torch.zeros(4, 4, dtype=torch.bfloat16, requires_grad=True)
    graph = run_step(_InFloat.apply, torch.zeros(4, 8, dtype=torch.bfloat16), weight)
    found = [o for o in graph.operations if o.name.endswith("mm.dtype")]
    assert [o.workspace_bytes for o in found] == [32, 32, 32]  # 4x4 elements of every second
    assert [o.flops for o in found] == [2 * 4**3] * 3
    assert all(o.keeps == ("cuBLAS workspace",) for o in found)


# -- Workspaces of cuBLAS --


def test_the_default_follows_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, nbytes in (((7, 5), AMPERE), ((8, 9), AMPERE), ((9, 0), HOPPER)):
        with use_gpu(Gpu(capability=capability)):
            assert cublas_workspace_bytes() == nbytes
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert cublas_workspace_bytes() == 32 << 20


def make_forces(multithreaded: bool = True) -> nn.Module:
    """Makes an interatomic potential, as in SchNetPack: forces are the gradient of the energy."""

    def run(model: Any, positions: Tensor) -> Tensor:
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(multithreaded):
            energy = model.energy(positions.requires_grad_()).square().sum()
            return -torch.autograd.grad(energy, positions, create_graph=model.training)[0]

    return Runs(run, energy=nn.Linear(8, 8, bias=False))


@pytest.mark.parametrize(
    ("model", "mode", "count"),
    [
        # Backward has a handle of its own: that of the engine's thread.
        (nn.Linear(8, 4), "train", 2),
        (nn.Linear(8, 4, bias=False), "infer", 1),
        (nn.ReLU(), "infer", 0),
        (make_forces(), "infer", 2),
        (make_forces(multithreaded=False), "infer", 1),
    ],
)
def test_each_thread_keeps_a_workspace(model: nn.Module, mode: str, count: int) -> None:
    graph = analyze(model, ("16x8",), device="cuda", mode=mode).graph
    found = [s for s in graph.storages if s.category is Category.WORKSPACE]
    assert all(storage.died is None for storage in found)
    assert [(s.name, s.nbytes) for s in found] == [("cuBLAS workspace", AMPERE)] * count


# -- Experts multiplied together, as transformers' Mixtral, Qwen2-MoE and OLMoE do by default --

TOKENS, EXPERTS, WIDTH, INNER = 32, 4, 16, 24


def choose_experts(model: Any, x: Tensor) -> Tensor:
    """Does as ``transformers.integrations.moe.grouped_mm_experts_forward`` in its core."""
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0):
        raise NotImplementedError("no grouped products")
    chosen, order = model.gate(x).argmax(dim=-1).sort()
    chosen = chosen.int() if x.is_cuda else chosen.float()
    counted = torch.histc(chosen, bins=EXPERTS, min=0, max=EXPERTS - 1)
    offsets = counted.cumsum(0, dtype=torch.int32)
    return nn.functional.grouped_mm(x[order], model.up.transpose(-2, -1), offs=offsets)


@pytest.mark.parametrize(
    ("gpu", "dtype", "kept"),
    [
        # cuBLAS multiplies group by group, forward and backward with a handle each.
        ("a100-80gb", "bf16", [AMPERE] * 2),
        ("h100", None, [HOPPER] * 2),
        # CUTLASS multiplies bfloat16: the gate alone goes to cuBLAS, and has no backward.
        ("h100", "bf16", [HOPPER]),
    ],
)
def test_experts(gpu: str, dtype: str | None, kept: list[int]) -> None:
    up = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))
    model, spec = Runs(choose_experts, gate=nn.Linear(WIDTH, EXPERTS), up=up), f"{TOKENS}x{WIDTH}"
    analysis = analyze(model, (spec,), device="cuda", gpu=gpu, dtype=dtype)
    found = [s.nbytes for s in analysis.graph.storages if s.category is Category.WORKSPACE]
    assert found == kept
    assert any("CUTLASS" in note for note in analysis.setup.notes)
    # Code sees the capability of the target GPU.
    with pytest.raises(Exception, match="no grouped products"):
        analyze(model, (spec,), device="cuda", gpu="t4")


@pytest.mark.parametrize(("dtype", "padded"), [(torch.float32, 12), (torch.bfloat16, 16)])
def test_rows_of_experts_are_padded_to_16_bytes(dtype: torch.dtype, padded: int) -> None:
    with on_gpu():
        x, offsets = empty(32, 16, dtype=dtype), empty(4, dtype=torch.int32)
        weights = empty(4, 16, 10, dtype=dtype)
        out, held = run_kernel(aten._grouped_mm.default, x, weights, offsets)
        gradient, _ = run_kernel(aten._grouped_mm.default, x.t(), out, offsets)
    assert (out.shape, out.stride(), held) == ((32, 10), (padded, 1), 0)
    assert (gradient.shape, gradient.stride()) == ((4, 16, 10), (16 * padded, padded, 1))
