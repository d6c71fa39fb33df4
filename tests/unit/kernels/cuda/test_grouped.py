"""Experts multiplied together, as transformers' Mixtral, Qwen2-MoE and OLMoE do by default."""

from __future__ import annotations

import pytest
import torch
from cuda_steps import run_kernel
from torch import Tensor, nn

from fxmem import analyze
from fxmem.graph import Category

aten = torch.ops.aten
TOKENS, EXPERTS, WIDTH, INNER = 32, 4, 16, 24


class Experts(nn.Module):
    """The core of ``transformers.integrations.moe.grouped_mm_experts_forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0):
            raise NotImplementedError("no grouped products")
        chosen, order = self.gate(x).argmax(dim=-1).sort()
        counted = torch.histc(
            chosen.int() if x.is_cuda else chosen.float(), bins=EXPERTS, min=0, max=EXPERTS - 1
        )
        offsets = counted.cumsum(0, dtype=torch.int32)
        return nn.functional.grouped_mm(x[order], self.up.transpose(-2, -1), offs=offsets)


def kept(gpu: str, dtype: str | None) -> tuple[list[int], tuple[str, ...]]:
    """The workspaces that a step finds, and what the analysis notes."""
    analysis = analyze(Experts(), (f"{TOKENS}x{WIDTH}",), device="cuda", gpu=gpu, dtype=dtype)
    found = [s.nbytes for s in analysis.graph.storages if s.category is Category.WORKSPACE]
    return found, analysis.setup.notes


def test_cublas_multiplies_group_by_group() -> None:
    # Forward and backward have a handle each.
    found, _ = kept("a100-80gb", "bf16")
    assert found == [8519680] * 2
    assert kept("h100", None)[0] == [32 << 20] * 2


def test_on_hopper_cutlass_multiplies_bfloat16() -> None:
    # The gate alone goes to cuBLAS, and the choice of an expert has no backward.
    found, notes = kept("h100", "bf16")
    assert found == [32 << 20]
    assert any("CUTLASS's tensor maps" in note for note in notes)


def test_code_sees_the_capability_of_the_gpu_that_is_meant() -> None:
    real = torch.cuda.get_device_capability
    with pytest.raises(Exception, match="no grouped products"):
        analyze(Experts(), (f"{TOKENS}x{WIDTH}",), device="cuda", gpu="t4")
    assert torch.cuda.get_device_capability is real


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("dtype", "padded"), [(torch.float32, 12), (torch.bfloat16, 16)])
def test_rows_are_padded_to_16_bytes(dtype: torch.dtype, padded: int) -> None:
    x, offsets = torch.empty(32, 16, dtype=dtype), torch.empty(4, dtype=torch.int32)
    weights = torch.empty(4, 16, 10, dtype=dtype)
    out, held = run_kernel(aten._grouped_mm.default, x, weights, offsets)
    assert (out.shape, out.stride(), held) == ((32, 10), (padded, 1), 0)
    gradient, _ = run_kernel(aten._grouped_mm.default, x.t(), out, offsets)
    assert (gradient.shape, gradient.stride()) == ((4, 16, 10), (16 * padded, padded, 1))
