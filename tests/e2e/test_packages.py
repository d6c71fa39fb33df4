"""Packages with compiled modules, by their own Python: ``.ci/run`` installs it into a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = os.environ.get("FXMEM_PACKAGES", "")
pytestmark = pytest.mark.skipif(not PACKAGES, reason="FXMEM_PACKAGES names no folder")

BEGIN = """
import torch
from torch import cuda
def make(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.float16, requires_grad=True)
w = make(4)
optimizer = torch.optim.SGD([w], lr=0.1)  # which ends the step
def show(call):
    cuda.reset_peak_memory_stats()
    before = cuda.memory_allocated()
    result = call()
    forward, kept = cuda.max_memory_allocated() - before, cuda.memory_allocated() - before
    if result.requires_grad:
        result.sum().backward()
    print(forward, kept, cuda.max_memory_allocated() - before)
"""
END = """
w.sum().backward()
optimizer.step()
"""
FLASH = """
from flash_attn import *
from flash_attn import flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_func
from flash_attn import flash_attn_varlen_func, flash_attn_varlen_kvpacked_func
from flash_attn import flash_attn_varlen_qkvpacked_func, flash_attn_with_kvcache
from flash_attn.bert_padding import pad_input, unpad_input
B, S, H, K, D = 2, 384, 8, 2, 72
starts = torch.tensor([0, 100, 300, 768], dtype=torch.int32, device="cuda")
mask = torch.ones(B, S, device="cuda", dtype=torch.bool)
def three(heads=K, dim=D):
    return make(B, S, H, dim), make(B, S, heads, dim), make(B, S, heads, dim)
def rows():
    return make(B * S, H, D), make(B * S, K, D), make(B * S, K, D)
show(lambda: flash_attn_func(*three(), causal=True))
show(lambda: flash_attn_func(*three(dim=70), 0.1, deterministic=True))
show(lambda: flash_attn_func(*three(dim=70), 0.1, return_attn_probs=True)[0])
show(lambda: flash_attn_func(make(1, 64, 2, D), make(1, 8192, 2, D), make(1, 8192, 2, D)))
show(lambda: flash_attn_func(make(1, 1, 4, D), make(1, 8192, 2, D), make(1, 8192, 2, D)))
show(lambda: flash_attn_kvpacked_func(make(B, S, H, D), make(B, S, 2, K, D)))
show(lambda: flash_attn_kvpacked_func(make(B, S, H, 30), make(B, S, 2, K, 30)))
show(lambda: flash_attn_qkvpacked_func(make(B, S, 3, H, D)))
show(lambda: flash_attn_qkvpacked_func(make(B, S, 3, H, 30)))
show(lambda: flash_attn_varlen_func(*rows(), starts, starts, 200, 200, causal=True))
options = {"deterministic": True, "window_size": (5, 5)}
show(lambda: flash_attn_varlen_func(*rows(), starts, starts, 200, 200, **options))
kv = lambda: make(B * S, 2, K, D)
show(lambda: flash_attn_varlen_kvpacked_func(make(B * S, H, D), kv(), starts, starts, 200, 200))
show(lambda: flash_attn_varlen_qkvpacked_func(make(B * S, 3, H, D), starts, 200))
show(lambda: flash_attn_with_kvcache(make(1, 1, 4, D), make(1, 8192, 2, D), make(1, 8192, 2, D)))
show(lambda: pad_input(*unpad_input(make(B, S, D), mask)[:2], B, S))
"""


def run(folder: Path, code: str, packages: str = PACKAGES) -> list[str]:
    """Runs code by ``fxmem run``; returns the lines of figures that it prints."""
    script = folder / "script.py"
    script.write_text(BEGIN + code + END)
    path = os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-m", "fxmem", "run", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if line[:1].isdigit()]


def test_the_functions_of_flash_attn_take_what_its_own_python_does(tmp_path: Path) -> None:
    own, ours = run(tmp_path, FLASH), run(tmp_path, FLASH, "")
    assert own == ours and len(own) == 15


XFORMERS = """
from xformers.ops import LowerTriangularMask, fmha, memory_efficient_attention
three = lambda: [make(2, 512, 8, 64) for _ in range(3)]
bias = torch.randn(2, 8, 512, 512, device="cuda", dtype=torch.float16)
show(lambda: memory_efficient_attention(*three(), attn_bias=LowerTriangularMask()))
show(lambda: memory_efficient_attention(*three(), attn_bias=bias))
show(lambda: memory_efficient_attention(*three(), op=(fmha.cutlass.FwOp, fmha.cutlass.BwOp)))
lengths = fmha.attn_bias.BlockDiagonalMask.from_seqlens([500, 524])
show(lambda: memory_efficient_attention(*(make(1, 1024, 8, 64) for _ in "qkv"), attn_bias=lengths))
"""


def test_attention_of_xformers(tmp_path: Path) -> None:
    figures = [[int(word) for word in line.split()] for line in run(tmp_path, XFORMERS)]
    inputs, sums = 2 * 512 * 8 * 64 * 2, 2 * 8 * 512 * 4
    # Beside the inputs a result and a sum for each row are kept.
    assert [kept for _, kept, _ in figures] == [4 * inputs + sums] * 4


MAMBA = """
from mamba_ssm import Mamba, Mamba2
for kind, state in ((Mamba, 16), (Mamba2, 64)):
    model = torch.nn.Sequential(*(kind(d_model=256, d_state=state) for _ in range(2))).cuda()
    show(lambda: model(torch.randn(2, 1024, 256, device="cuda")))
"""


def test_layers_of_mamba(tmp_path: Path) -> None:
    printed = run(tmp_path, MAMBA)
    assert len(printed) == 2 and all(len(line.split()) == 3 for line in printed)


TRITON = """
import triton
import triton.language as tl

configs = [triton.Config({"BLOCK": block}, num_warps=4) for block in (128, 256)]

@triton.autotune(configs, key=["n"])
@triton.heuristics({"EVEN": lambda arguments: arguments["n"] % arguments["BLOCK"] == 0})
@triton.jit
def square(x, y, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + offsets, mask=offsets < n)
    tl.store(y + offsets, values * values, mask=offsets < n)

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        square[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
        return y

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient

show(lambda: Square.apply(make(1024, 1024)))
from liger_kernel.transformers import LigerRMSNorm
show(lambda: LigerRMSNorm(1024).cuda().half()(make(1024, 1024)))
"""


def test_kernels_of_the_script_and_of_liger(tmp_path: Path) -> None:
    own, norm = [list(map(int, line.split())) for line in run(tmp_path, TRITON)]
    size = 1024 * 1024 * 2
    # x and y; then 2 * x and the product are made, beside the sum and its gradient.
    assert own == [2 * size, 2 * size, 4 * size + 2 * 512]
    rows = 1024 * 4  # what each row is scaled by, in float32
    assert norm[1] == 2 * size + rows + 1024 * 2
