"""Devices as code sees them while a GPU is stood in for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fxmem.kernels.cuda import CUDA as TARGET
from fxmem.kernels.cuda.devices import view_devices
from fxmem.kernels.cuda.gpu import GPU_DEVICE
from fxmem.kernels.functions import lower_functions
from fxmem.recording.recorder import Recorder
from fxmem.tracing.fakes import make_fake_mode

CUDA = torch.device("cuda", 0)


@pytest.fixture
def x() -> Iterator[torch.Tensor]:
    """A tensor on the GPU that is not there."""
    with make_fake_mode(), view_devices(GPU_DEVICE):
        yield torch.empty(4, 8, device="cuda")


def test_a_tensor_on_the_gpu_says_so(x: torch.Tensor) -> None:
    assert x.device == CUDA and x.is_cuda and not x.is_cpu and x.get_device() == 0
    assert x.fake_device == GPU_DEVICE


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.zeros(3, device=x.device),
        lambda x: torch.zeros(3, device="cuda:0"),
        lambda x: torch.zeros(3).to(x.device),
        lambda x: torch.zeros(3).to("cuda"),
        lambda x: torch.zeros(3).cuda(),
        lambda x: x.new_zeros(3),
        lambda x: torch.tensor([1.0, 2.0], device=x.device),
        lambda x: torch.nn.functional.embedding_bag(  # makes offsets beside its input
            torch.zeros(2, 3, dtype=torch.int64, device="cuda"), torch.zeros(5, 4, device="cuda")
        ),
        lambda x: torch.zeros_like(x),
        lambda x: torch.nn.functional.one_hot(x.argmax(1), 8),
        lambda x: x * torch.tensor(2.0),
    ],
)
def test_what_is_made_beside_it_is_there_too(x: torch.Tensor, make: object) -> None:
    assert make(x).device == CUDA  # type: ignore[operator]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.arange(3),
        lambda x: torch.zeros_like(x, device="cpu"),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: torch.zeros(3).pin_memory(),
    ],
)
def test_what_names_no_device_lies_on_the_host(x: torch.Tensor, make: object) -> None:
    made = make(x)  # type: ignore[operator]
    assert made.device == torch.device("cpu") and made.is_cpu and made.get_device() == -1


def test_a_copied_value_is_where_it_was_copied_to(x: torch.Tensor) -> None:
    with Recorder(TARGET), lower_functions(TARGET):
        empty = torch.tensor([], device="cuda")
        assert torch.cat([empty, x.flatten()]).is_cuda


def test_what_is_computed_from_a_copied_value_lies_beside_it_and_has_a_value(
    x: torch.Tensor,
) -> None:
    with Recorder(TARGET), lower_functions(TARGET):
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
