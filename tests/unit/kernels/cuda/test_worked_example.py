"""A published walk through ``torch.cuda.memory_allocated()``, difference by difference.

Three layers without biases, 1024 to 1024 to 1024 to 1, on a batch of 1024, in float32, without
cuBLAS's workspaces (which PyTorch did not allocate itself when the figures were taken). Expected
are the differences that were printed on a GPU.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import nn

import fxmem
from fxmem.graph import Phase
from fxmem.memory.timeline import build_timeline

PARAMETERS = (4194304, 4194304, 4096)
INPUT = 4194304
FORWARD = (4194304, 4194304, 4096)
LOSS = 512
FIRST_BACKWARD = 4096
LATER_FORWARD = 8388608
LATER_BACKWARD = -8388608


def round_up(nbytes: int) -> int:
    """``round_size`` of the caching allocator; a free gives back what was rounded."""
    size = -(-abs(nbytes) // 512) * 512
    return size if nbytes > 0 else -size


def test_every_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """In iterations as the loop has them: names are rebound, gradients kept."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    sizes = ((1024, 1024), (1024, 1024), (1024, 1))
    model = nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes))
    settings = {"device": "cuda", "hold_outputs": True, "set_to_none": False}
    analysis = fxmem.analyze(model, ("1024x1024",), loss=torch.sum, **settings)

    changes = [round_up(nbytes) for _, nbytes in analysis.graph.warmup]
    expected = (*PARAMETERS, INPUT, *FORWARD, LOSS)
    assert tuple(changes[: len(expected)]) == expected
    assert sum(changes) - sum(expected) == FIRST_BACKWARD

    # Every later iteration.
    events, live = analysis.timeline.events, analysis.timeline.live_bytes()
    last = {event.phase: nbytes for event, nbytes in zip(events, live, strict=True)}
    start = analysis.timeline.resident_bytes
    assert start == sum(PARAMETERS) * 2 + INPUT + FORWARD[-1] + LOSS
    assert last[Phase.LOSS] - start == LATER_FORWARD
    assert last[Phase.BACKWARD] - last[Phase.LOSS] == LATER_BACKWARD
    # Blocks are as large as rounded requests.
    requested = [round_up(event.delta_bytes) for event in build_timeline(analysis.graph).events]
    assert [event.delta_bytes for event in events] == requested
    assert analysis.peak_bytes == max(accumulate(requested, initial=start))
