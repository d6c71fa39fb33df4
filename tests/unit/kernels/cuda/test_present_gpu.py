"""Streams of a GPU that is not there, as ``torch.cuda`` has them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fxmem.kernels.cuda.gpu import Gpu, find_stream
from fxmem.kernels.cuda.present_gpu import show_gpu


@pytest.fixture(autouse=True)
def shown() -> Iterator[None]:
    with show_gpu(Gpu()):
        yield
    assert find_stream() == 0


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


def test_streams_come_in_turn_from_a_pool_of_their_priority() -> None:
    """``kStreamsPerPool`` in c10/cuda/CUDAStream.cpp is 32."""
    streams = [torch.cuda.Stream() for _ in range(33)]
    urgent = torch.cuda.Stream(priority=-1)
    assert streams[32] == streams[0] and len({*streams, urgent}) == 33
    assert torch.cuda.ExternalStream(urgent.cuda_stream) == urgent
