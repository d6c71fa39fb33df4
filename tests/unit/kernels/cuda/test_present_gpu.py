"""The GPU that is not there, as code sees it in ``torch.cuda``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fxmem
from fxmem.graph import MemoryGraph
from fxmem.kernels.cuda.gpu import Gpu, find_stream
from fxmem.kernels.cuda.present_gpu import show_gpu


@pytest.mark.usefixtures("shown_gpu")
def test_the_current_stream_is_known() -> None:
    first, second = torch.cuda.Stream(), torch.Stream(device="cuda")
    assert find_stream() == 0 and torch.cuda.current_stream() == torch.cuda.default_stream(device=0)
    with torch.cuda.stream(first):
        assert find_stream() == first.stream_id != 0
        with torch.cuda.stream(None), second:
            assert find_stream() == second.stream_id != first.stream_id
            assert torch.accelerator.current_stream() == second
        assert torch.cuda.current_stream(device=0) == first
        torch.cuda.set_stream(second)
        assert find_stream() == second.stream_id
    assert find_stream() == 0
    torch.cuda.set_stream(first)
    assert find_stream() == first.stream_id


@pytest.mark.usefixtures("shown_gpu")
def test_nothing_is_waited_for() -> None:
    stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    assert stream.record_event(event) is event and stream.query() and event.query()
    stream.wait_stream(torch.cuda.current_stream())
    stream.wait_event(stream.record_event())
    stream.synchronize()
    event.record(stream)
    torch.Event().wait(stream)
    assert event.elapsed_time(stream.record_event()) > 0
    torch.ones(2).record_stream(stream)
    assert find_stream() == 0


@pytest.mark.usefixtures("shown_gpu")
def test_streams_come_in_turn_from_a_pool_of_their_priority() -> None:
    """``kStreamsPerPool`` in c10/cuda/CUDAStream.cpp is 32."""
    streams = [torch.cuda.Stream() for _ in range(33)]
    urgent = torch.cuda.Stream(priority=-1)
    assert streams[32] == streams[0] and len({*streams, urgent}) == 33
    assert torch.cuda.ExternalStream(urgent.cuda_stream) == urgent


@pytest.mark.parametrize("name", ["transformers.utils.import_utils", "torch.utils._triton"])
def test_functions_that_keep_an_answer_ask_again(name: str, monkeypatch: Any) -> None:
    module: Any = ModuleType(name)
    module.is_torch_cuda_available = functools.cache(lambda: torch.cuda.is_available())
    monkeypatch.setitem(sys.modules, name, module)
    before = module.is_torch_cuda_available()
    with show_gpu(Gpu()):
        assert module.is_torch_cuda_available()
    assert module.is_torch_cuda_available() == before


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
