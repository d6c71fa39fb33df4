"""Code under torch.compile, which PyTorch's own compiler lowers for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem import TraceError, UsageError
from fxmem.scripts.recording import Recording
from fxmem.versions.release import is_release

pytestmark = [
    pytest.mark.skipif(not is_release((2, 13)), reason="compiled steps need torch 2.13"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
MIB = 1 << 20


class Chain(nn.Module):
    """Takes 64 MiB for each of its intermediate results, if each is kept."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4096))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x * self.scale)
        if self.breaks:
            torch._dynamo.graph_break()
        return (torch.sin(x) + 1).square().mean()


def record_steps(compile: bool = True, breaks: bool = False, **options: Any) -> Recording:
    with fxmem.record(gpu="h100", steps=3, compile=compile) as recording:
        model = Chain(breaks).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run: Callable[[Tensor], Tensor] = torch.compile(model, **options)
        x = torch.randn(4096, 4096, device="cuda")
        for _ in range(4):
            run(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    return recording


@pytest.fixture(scope="module")
def compiled() -> Recording:
    return record_steps()


def test_a_fused_step_holds_less_and_every_step_the_same(compiled: Recording) -> None:
    eager = record_steps(compile=False)
    # Eager mode keeps tanh, sin and the sum for backward; the compiler recomputes them.
    assert eager.peak.nbytes > compiled.peak.nbytes + 128 * MIB
    assert len({step.peak_bytes for step in compiled.steps}) == 1
    assert "torch.compile was left out: the figures are of eager mode." in eager.notes
    assert compiled.notes == (
        "torch.compile: graphs compiled for the GPU, recompilations included: 1.",
    )
    assert not compiled.steps[-1].setup.compiled


def test_code_between_two_graphs_is_recorded_and_the_break_is_named(compiled: Recording) -> None:
    broken = record_steps(breaks=True)
    line = Chain.forward.__code__.co_firstlineno + 3
    assert f"torch.compile breaks the graph at test_compiler.py:{line}." in broken.notes
    assert broken.peak.nbytes >= compiled.peak.nbytes + 64 * MIB  # tanh's result is handed over


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_backends_that_compile_nothing_run_as_they_are(backend: str) -> None:
    recording = record_steps(backend=backend)
    assert len({step.peak_bytes for step in recording.steps[1:]}) == 1
    assert not recording.notes


def test_buffers_have_the_names_of_the_operators_that_write_them(compiled: Recording) -> None:
    storages = compiled.steps[-1].graph.storages
    assert any("tanh" in storage.name for storage in storages)


def test_a_compiled_optimizer_ends_its_steps() -> None:
    with fxmem.record(gpu="h100", steps=2, compile=True) as recording:
        model = nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        step = torch.compile(optimizer.step)
        for _ in range(3):
            model(torch.randn(8, 64, device="cuda")).square().mean().backward()
            step()
            optimizer.zero_grad()
    assert len(recording.steps) == 2


def test_dynamo_is_left_as_it_was(compiled: Recording) -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    rules: Any = torch._dynamo.trace_rules
    assert not any("fxmem" in folder for folder in rules.SKIP_DIRS)
    doubled: Any = torch.compile(double, backend="eager")
    assert torch.equal(doubled(torch.ones(2)), torch.full((2,), 2.0))
    assert record_steps().peak.nbytes == compiled.peak.nbytes


def test_other_modes_say_what_is_not_counted() -> None:
    recording = record_steps(mode="reduce-overhead")
    assert any("mode='reduce-overhead') is analysed as the default" in n for n in recording.notes)


def test_what_is_not_analysed_is_refused() -> None:
    with pytest.raises(UsageError, match=r"torch.compile\(backend='cudagraphs'\) is not analysed"):
        record_steps(backend="cudagraphs")
    with (
        pytest.raises(UsageError, match="compile=True with device='cpu'"),
        fxmem.record(device="cpu", compile=True),
    ):
        raise TraceError("it runs")
