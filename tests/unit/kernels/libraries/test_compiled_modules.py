"""Compiled modules of packages whose Python is enough: by hand from their sources."""

from __future__ import annotations

import torch

import fxmem

BLOCK = 512


def round_block(*sizes: int) -> int:
    return sum(-(-size // BLOCK) * BLOCK for size in sizes)


def test_mamba_s_scan() -> None:
    """``selective_scan.cpp`` of mamba_ssm 2.3.2."""
    batch, dim, length, state = 2, 64, 3000, 16
    with fxmem.record(gpu="a100-80gb", steps=1) as recording:
        import selective_scan_cuda

        def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(*shape, device="cuda", dtype=dtype)

        u, delta, z, gradient = (make(batch, dim, length) for _ in range(4))
        a, d = make(dim, state, dtype=torch.float32), make(dim, dtype=torch.float32)
        b, c = (make(batch, 1, state, length) for _ in range(2))
        before = torch.cuda.memory_allocated()
        made = selective_scan_cuda.fwd(u, delta, a, b, c, d, z, None, True)
        forward = torch.cuda.memory_allocated() - before
        out, states, _gated = made
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        arguments = (d, z, None, gradient, states, out, None, True, True)
        found = selective_scan_cuda.bwd(u, delta, a, b, c, *arguments)
        backward = torch.cuda.max_memory_allocated() - before
        (torch.ones(1, device="cuda", requires_grad=True) * 1).backward()
    assert recording.steps and [x is None for x in found] == [False] * 6 + [True] + [False] * 2
    whole, sums = 2 * batch * dim * length, 4 * batch * state * length
    # Two chunks of 2048: states of twice 16 numbers in float.
    assert forward == round_block(whole, batch * dim * 2 * 2 * state * 4, whole)
    # The gradients of z, of u and of the step, the result again; of A and D in float; of B and C
    # in float, and then in bfloat16.
    sizes = *[whole] * 4, dim * state * 4, dim * 4, *[sums] * 2, *[sums // 2] * 2
    assert backward == round_block(*sizes)


def test_causal_conv1d_writes_what_its_python_allocates() -> None:
    with fxmem.record(gpu="a100-80gb", steps=1):
        import causal_conv1d_cuda

        x = torch.empty(8, device="cuda")
        assert causal_conv1d_cuda.causal_conv1d_fwd(x, x) is None
        assert torch.cuda.max_memory_allocated() == BLOCK
        (torch.ones(1, device="cuda", requires_grad=True) * 1).backward()
