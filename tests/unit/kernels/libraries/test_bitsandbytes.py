"""bitsandbytes on fakes: its own Python allocates, its compiled library is not called."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import nn

import fxmem
from fxmem.scripts.recording import Recording

bitsandbytes = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:bitsandbytes")
MIB = 1 << 20


def record_linear(rows: int) -> Recording:
    with fxmem.record(gpu="a100-80gb", steps=1) as recording:
        layer = bitsandbytes.nn.Linear4bit(1024, 1024, bias=False, compute_dtype=torch.bfloat16)
        layer.cuda()
        x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        layer(x).sum().backward()
    return recording


def test_many_rows_are_multiplied_by_the_dequantized_weight() -> None:
    step = record_linear(4096).steps[-1]
    assert step.forward_flops == 2 * 4096 * 1024 * 1024
    weights = [s for s in step.graph.storages if s.shape == (1024, 1024) and s.dtype == "bfloat16"]
    assert len(weights) == 2 and {s.nbytes for s in weights} == {2 * MIB}  # forward and backward


def test_few_rows_are_multiplied_by_a_kernel_of_its_own() -> None:
    step = record_linear(8).steps[-1]
    assert step.forward_flops == 0


def test_weights_are_packed_and_keep_their_class() -> None:
    bitsandbytes.nn.Linear4bit(64, 64).to("cpu")  # whose tables the package keeps
    with fxmem.record(gpu="a100-80gb") as recording:
        layer = bitsandbytes.nn.Linear4bit(1024, 1024, bias=False).cuda()
        packed = torch.cuda.memory_allocated()
        other = copy.deepcopy(layer)
        kinds = [type(each.weight).__name__ for each in (layer, other)]
        is_known = isinstance(other.weight, bitsandbytes.nn.Params4bit)
        states = [each.weight.quant_state.nested for each in (layer, other)]
        (torch.ones(1, device="cuda", requires_grad=True) * 1).backward()
    # 4 bits, 8 bits for each 64, 32 for each 256 of these; a code of 16, two of 256, an offset.
    blocks = 1024 * 1024 // 64
    sizes = 1024 * 1024 // 2, blocks, blocks // 256 * 4, 16 * 4, 256 * 4, 256 * 4, 4
    assert packed == sum(-(-nbytes // 512) * 512 for nbytes in sizes)
    assert kinds == ["Params4bit"] * 2 and is_known and states == [True, True]
    assert recording.steps


@pytest.mark.parametrize(("name", "state"), [("AdamW8bit", 2), ("Lion8bit", 1), ("AdamW", 8)])
def test_states_take_their_bytes(name: str, state: int) -> None:
    with fxmem.record(gpu="a100-80gb", steps=2) as recording:
        model = nn.Linear(4096, 4096, bias=False).cuda()
        optimizer = getattr(bitsandbytes.optim, name)(model.parameters(), lr=1e-3)
        for _ in range(3):
            model(torch.randn(8, 4096, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    held = [
        s for s in recording.steps[-1].graph.storages if s.name.startswith("model.weight.state")
    ]
    assert sum(s.nbytes for s in held) == state * 16 * MIB


def test_paged_states_are_told_and_not_counted() -> None:
    with fxmem.record(gpu="a100-80gb", steps=2) as recording:
        model = nn.Linear(4096, 4096, bias=False).cuda()
        optimizer = bitsandbytes.optim.PagedAdamW8bit(model.parameters(), lr=1e-3)
        for _ in range(3):
            model(torch.randn(8, 4096, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not any("state1" in s.name for s in recording.steps[-1].graph.storages)
    assert [note for note in recording.notes if note.startswith("32.00 MiB of paged optimizer")]


def test_the_package_is_left_as_it_was() -> None:
    functional: Any = importlib.import_module("bitsandbytes.functional")
    before = functional.lib, functional.get_paged, dict(functional.name2qmap)
    record_linear(8)
    assert (functional.lib, functional.get_paged, dict(functional.name2qmap)) == before
    kernels: Any = importlib.import_module("bitsandbytes.backends.cuda.ops")
    assert kernels.lib is functional.lib
    layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False).to("cpu")  # by the real library
    assert layer(torch.ones(2, 64)).isfinite().all()


def test_a_release_whose_optimizers_are_no_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    record_linear(8)  # which imports the module as a GPU's
    kernels = importlib.import_module("bitsandbytes.backends.cuda.ops")
    monkeypatch.delattr(kernels, "str2optimizer32bit")
    monkeypatch.setattr(bitsandbytes, "__version__", "0.46.1")
    with (
        pytest.raises(
            fxmem.TraceError,
            match=r"bitsandbytes 0\.46\.1 has optimizers that are no operators \(pip install",
        ),
        fxmem.record(gpu="a100-80gb"),
    ):
        pass
