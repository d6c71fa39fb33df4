"""Fixtures of the tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cuda_steps import on_gpu

from fxmem.kernels.cuda.gpu import Gpu
from fxmem.kernels.cuda.present_gpu import show_gpu


@pytest.fixture
def gpu() -> Iterator[None]:
    """Fake tensors that are made lie on a GPU."""
    with on_gpu():
        yield


@pytest.fixture
def shown_gpu() -> Iterator[None]:
    """Code that asks for a GPU finds one."""
    with show_gpu(Gpu()):
        yield


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Sets the threads of kernels: some take scratch memory for each, from one or two on."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
