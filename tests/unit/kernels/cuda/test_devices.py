"""Devices as code sees them while a GPU is stood in for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fxmem
from fxmem.graph import MemoryGraph
from fxmem.kernels.cuda import CUDA as TARGET
from fxmem.kernels.cuda.gpu import GPU_DEVICE
from fxmem.kernels.functions import lower_functions
from fxmem.recording.recorder import Recorder
from fxmem.tracing.devices import translate_devices
from fxmem.tracing.fakes import make_fake_mode

CUDA = torch.device("cuda", 0)


@pytest.fixture
def x() -> Iterator[torch.Tensor]:
    """A tensor on the GPU that is not there."""
    with make_fake_mode(), translate_devices(GPU_DEVICE):
        yield torch.empty(4, 8, device="cuda")


def test_a_tensor_on_the_gpu_says_so(x: torch.Tensor) -> None:
    assert x.device == CUDA and x.is_cuda and not x.is_cpu and x.get_device() == 0
    assert x.fake_device == GPU_DEVICE


def make_bags() -> torch.Tensor:
    """Makes offsets beside its input."""
    indices = torch.zeros(2, 3, dtype=torch.int64, device="cuda")
    return torch.nn.functional.embedding_bag(indices, torch.zeros(5, 4, device="cuda"))


def test_what_is_made_beside_it_is_there_too(x: torch.Tensor) -> None:
    for made in (
        torch.zeros(3, device=x.device),
        torch.zeros(3, device="cuda:0"),
        torch.zeros(3).to(x.device),
        torch.zeros(3).to("cuda"),
        torch.zeros(3).cuda(),
        x.new_zeros(3),
        torch.tensor([1.0, 2.0], device=x.device),
        make_bags(),
        torch.zeros_like(x),
        torch.nn.functional.one_hot(x.argmax(1), 8),
        x * torch.tensor(2.0),
    ):
        assert made.device == CUDA


def test_what_names_no_device_lies_on_the_host(x: torch.Tensor) -> None:
    on_host = torch.zeros_like(x, device="cpu"), torch.zeros(3).pin_memory()
    for made in (torch.arange(3), x.cpu(), x.to("cpu"), *on_host):
        assert made.device == torch.device("cpu") and made.is_cpu and made.get_device() == -1


ASKS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.width = 64 if torch.cuda.is_available() else 8
        self.layer = nn.Linear(4, self.width, device="cuda" if self.width > 8 else "cpu")

    def forward(self, x):
        y = self.layer(x)
        if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0):
            y = torch.cat([y, y])
        if not torch.cuda.device_count():
            return y[:1]
        with torch.cuda.device(y.device):
            gpu = torch.cuda.get_device_properties(y.device)
        assert (gpu.major, gpu.minor) == torch.cuda.get_device_capability(y.device)
        return y + y.new_zeros(gpu.multi_processor_count, 1, self.width).sum(0)

def make_stages():
    return [Net(), nn.Linear(64 if torch.cuda.is_available() else 8, 8)]

if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    Net().to(device)(torch.ones(3, 4, device=device)).sum().backward()
"""


def run_ways(path: Path, **options: Any) -> Iterator[MemoryGraph]:
    """Runs the code above in each way that there is."""
    for way in ({}, {"mode": "infer"}, {"mesh": {"dp": 1}, "parallelize": "ddp"}):
        yield fxmem.analyze(f"{path}:Net", ("3x4",), **way, **options).graph
    pipeline = fxmem.pipeline(
        f"{path}:make_stages", ("3x4",), schedule="GPipe", microbatches=1, **options
    )
    yield pipeline.ranks[0].graph
    yield fxmem.run(str(path), **options).steps[0].graph


def test_code_that_asks_finds_the_target_in_all_ways(tmp_path: Path) -> None:
    path = tmp_path / "asks.py"
    path.write_text(ASKS)
    for gpu, rows, parts in ("h100", 6, 132), ("a100-80gb", 3, 108):
        made = {(64, 4), (rows, 64), (parts, 1, 64)}
        for graph in run_ways(path, gpu=gpu):
            assert made <= {storage.shape for storage in graph.storages}
    for graph in run_ways(path, device="cpu"):
        assert (8, 4) in {storage.shape for storage in graph.storages}


def test_copied_values_lie_where_they_were_copied_to_and_keep_them(x: torch.Tensor) -> None:
    with Recorder(TARGET), lower_functions(TARGET):
        empty = torch.tensor([], device="cuda")
        assert torch.cat([empty, x.flatten()]).is_cuda
        two = torch.tensor(1, device="cuda") + 1
        assert two.is_cuda and (two == 2).is_cuda and two.item() == 2


def test_backward_sees_the_devices_of_fake_kernels(x: torch.Tensor) -> None:
    with lower_functions(TARGET):
        y = torch.empty(4, 8, device="cuda", requires_grad=True)
        (y * x).sum().backward()
    assert y.grad is not None and y.grad.is_cuda
    assert torch.empty(2, device="meta").device.type == "meta"


def test_the_two_do_not_mix(x: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(4, 8)
