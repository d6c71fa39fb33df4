"""CUDA's autocast in a step, and that nothing of it stays."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxmem import analyze
from fxmem.kernels.autocast.dispatch import lower_autocast
from fxmem.kernels.autocast.policies import find_policies
from fxmem.kernels.cuda.gpu import GPU_DEVICE
from fxmem.tracing.fakes import make_fake_mode

BF16 = torch.bfloat16
aten = torch.ops.aten


class Own(nn.Module):
    """Turns autocast on by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=BF16):
            return self.down(self.up(x).relu()).float()


def test_what_a_step_saves() -> None:
    analysis = analyze(Own(), ("16x8",), device="cuda")
    # mm: its input, cast, and the second one's weight, cast and transposed (the input of the
    # model needs no gradient); relu: its result, which is the second product's input.
    assert sorted((s.shape, s.dtype) for s in analysis.saved) == [
        ((16, 8), "bfloat16"),
        ((16, 32), "bfloat16"),
        ((32, 4), "bfloat16"),
    ]


DECORATED = """
import torch

class Model(torch.nn.Linear):
    @torch.autocast("cuda", dtype=torch.bfloat16)
    def forward(self, x):
        return super().forward(x)
"""


def test_a_decorated_function_is_believed_when_it_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "decorated.py"
    path.write_text(DECORATED)
    analysis = analyze(f"{path}:Model(8, 4)", ("16x8",), device="cuda")
    assert [(s.shape, s.dtype) for s in analysis.saved] == [((16, 8), "bfloat16")]


@pytest.mark.parametrize(("autocast", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_a_step_may_be_autocast_as_a_whole(autocast: str, dtype: str) -> None:
    analysis = analyze(nn.Linear(8, 4), ("16x8",), device="cuda", autocast=autocast)
    assert [(s.shape, s.dtype) for s in analysis.saved] == [((16, 8), dtype)]


def describe_kernels() -> list[str]:
    return [torch._C._dispatch_dump(operator.name()) for operator in find_policies()]


def test_nothing_stays() -> None:
    def look() -> tuple[Any, ...]:
        return (
            *describe_kernels(),
            torch._C._dispatch_tls_local_include_set(),
            torch._C._dispatch_tls_local_exclude_set(),
            torch.clear_autocast_cache,
            torch.cuda.is_bf16_supported,
            torch.cuda.amp.common.amp_definitely_not_available,
            torch.get_autocast_dtype("cuda"),
            torch.is_autocast_cache_enabled(),
            torch.autocast_increment_nesting() - torch.autocast_decrement_nesting(),
            torch.autocast_increment_nesting(),
            torch.autocast_decrement_nesting(),
        )

    before = look()
    with make_fake_mode(), pytest.raises(ZeroDivisionError), lower_autocast():
        x = torch.empty(8, 8, device=GPU_DEVICE)
        torch.autocast("cuda", dtype=BF16, cache_enabled=False).__enter__()  # and is not left
        assert torch.mm(x, x).dtype == BF16
        assert look() != before
        raise ZeroDivisionError
    assert look() == before


def test_other_threads_keep_their_kernels() -> None:
    """Calls what a thread with a real GPU would."""
    results = []

    def multiply() -> None:
        kernel = torch.library.get_kernel(aten.mm.default, "AutocastCUDA")
        ones = torch.ones(2, 2)
        results.append(kernel.call_boxed(torch._C._dispatch_keys(ones), ones, ones))

    with lower_autocast():
        thread = threading.Thread(target=multiply)
        thread.start()
        thread.join()
    assert torch.equal(results[0], torch.full((2, 2), 2.0))
