"""Translation of the devices that code names and asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from running import Runs
from torch import nn
from torch.utils import _device
from torch.utils._python_dispatch import return_and_correct_aliasing

import fxmem
from fxmem.fakes.devices import TypeOnGpu, translate_devices
from fxmem.fakes.fake_mode import make_fake_mode
from fxmem.kernels.cuda import CUDA as TARGET
from fxmem.kernels.cuda.gpu import GPU_DEVICE
from fxmem.kernels.functions import lower_functions
from fxmem.recording.recorder import Recorder


@pytest.fixture(autouse=True)
def default_device() -> Iterator[None]:
    yield
    torch.set_default_device(None)


def in_context() -> torch.Tensor:
    with torch.device("cuda"):
        return torch.zeros(2)


def in_old_context(x: torch.Tensor) -> torch.Tensor:
    with torch.cuda.device(1), torch.cuda.device_of(x):
        torch.cuda.set_device(torch.cuda.current_device())
        torch.cuda.synchronize()
    return x


def by_default(x: torch.Tensor) -> torch.Tensor:
    torch.set_default_device("cuda:1")
    return torch.zeros(2) + torch.empty_like(x) + torch.tensor([1.0, 2.0])


MOVES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], set[str]]] = {
    "cuda()": (lambda x: x.cuda(), {"cuda"}),
    "cuda(1)": (lambda x: x.cuda(1, non_blocking=True), {"cuda"}),
    "to": (lambda x: x.to("cuda"), {"cuda"}),
    "to with more": (lambda x: x.to("cuda:1", torch.float64, True), {"cuda:1"}),
    "to by name": (lambda x: x.to(device="mps", dtype=torch.float64), {"mps"}),
    "to an index": (lambda x: x.to(0), {"cuda:0"}),
    "zeros": (lambda x: torch.zeros(2, device="cuda"), {"cuda"}),
    "tensor": (lambda x: torch.tensor([1, 2], device="cuda"), {"cuda"}),
    "new_zeros": (lambda x: x.new_zeros(2, device="cuda"), {"cuda"}),
    "of its index": (lambda x: torch.zeros(2, device=x.get_device()), set()),
    "module.to": (lambda x: nn.Linear(2, 2).to("cuda", torch.float32)(x), {"cuda"}),
    "module on it": (lambda x: nn.Linear(2, 2, device="cuda")(x), {"cuda"}),
    "with torch.device": (lambda x: in_context(), {"cuda"}),
    "with torch.cuda.device": (in_old_context, set()),
    "set_default_device": (by_default, {"cuda:1"}),
    "pin_memory": (lambda x: x.pin_memory().cuda(non_blocking=True), {"cuda"}),
    "pinned": (lambda x: torch.zeros(2, pin_memory=True), set()),
    "the CPU": (lambda x: x.to("cpu") + torch.zeros(2, device="cpu"), set()),
}


@pytest.mark.parametrize("name", MOVES)
def test_an_accelerator_means_the_cpu(name: str) -> None:
    code, expected = MOVES[name]
    named: set[str] = set()
    with translate_devices(named=named):
        assert code(torch.ones(2)).device == torch.device("cpu")
    assert named == expected


def make(code: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return Runs(lambda model, x: model.linear(code(x).to(x.dtype)), linear=nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["cuda(1)", "to", "module.to", "with torch.device", "zeros"])
def test_a_model_that_names_devices_is_analysed_and_the_report_says_so(name: str) -> None:
    code, named = MOVES[name]
    analysis = fxmem.analyze(make(code), ("2x2",), device="cpu")
    note = f"The code names devices ({', '.join(named)}): taken as the target, cpu."
    assert analysis.setup.notes == ((note,) if named else ())
    analysis = fxmem.analyze(make(code), ("2x2",))
    assert (analysis.setup.device, analysis.setup.notes) == ("cuda", ())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_module_may_be_moved_in_forward(device: str) -> None:
    model = make(lambda x: model.linear.to(x.device)(x))
    analysis = fxmem.analyze(model, ("2x2",), device=device, optimizer="sgd-momentum")
    # What is there already stays, and is the optimizer's.
    assert analysis.gradient_bytes == analysis.optimizer_state_bytes == 4 * (2 * 2 + 2)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_default_device_of_the_user_s_is_no_obstacle(device: str) -> None:
    model = make(lambda x: x + torch.zeros(2))
    torch.set_default_device("cuda")
    analysis = fxmem.analyze(model, ("2x2",), device=device, optimizer="adam")
    note = "The code names devices (cuda): taken as the target, cpu."
    assert analysis.setup.notes == ((note,) if device == "cpu" else ())
    assert torch.device("cuda") == _device.CURRENT_DEVICE


PLAIN = """
import torch
from running import Runs
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.table = torch.arange(2.0, device="cuda")
        self.scale = torch.ones(2).cuda()
        self.host = torch.ones(2)

    def forward(self, x, on_host=False):
        return self.linear(x) * (self.host if on_host else self.table * self.scale)
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_attribute_lies_where_the_code_put_it(tmp_path: Path, device: str) -> None:
    path = tmp_path / "plain.py"
    path.write_text(PLAIN)
    assert fxmem.analyze(f"{path}:Net", ("3x2",), device=device).peak_bytes > 0
    if device == "cuda":  # what was made on the host stays there
        with pytest.raises(fxmem.TraceError, match=r"on the same device|two different devices"):
            fxmem.analyze(f"{path}:Net", ("3x2", True), device=device)


# -- on a GPU that is not there --

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
        torch.zeros(3).type(TypeOnGpu(torch.HalfTensor)),
        x.new(2, 3),
        x.new([1.0, 2.0]),
        x.new_tensor([1.0, 2.0]),
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
    with pytest.raises(RuntimeError, match=r"same device|two different devices"):
        x + torch.ones(4, 8)


class Wrapped(torch.Tensor):
    """Wraps a tensor, as torchao's packed weights do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        options = {"dtype": inner.dtype, "device": inner.device}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **options)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.round.default:  # to levels, as torchao's NF4 packs a weight
            inner = args[0].inner
            levels = torch.tensor([-1.0, 0.0, 1.0], device=inner.device)
            result = Wrapped(levels[(inner.unsqueeze(-1) - levels).abs().argmin(-1)])
        else:
            result = Wrapped(func(args[0].inner, *args[1:], **(kwargs or {})))
        return return_and_correct_aliasing(func, args, kwargs or {}, result)


def test_a_wrapper_lies_where_what_it_wraps_does() -> None:
    with fxmem.record(gpu="a100-80gb"):
        weight = nn.Parameter(Wrapped(torch.ones(4, device="cuda")), requires_grad=False)
        assert weight.device == weight.inner.device == torch.device("cuda", 0)
        with torch.no_grad():
            assert torch.round(weight).inner.is_cuda


class Packed(nn.Parameter):
    """Is made of plain data, and says how this is packed, as bitsandbytes' parameters do."""

    bits: int

    def __new__(cls, data: torch.Tensor, bits: int = 4) -> Any:
        made = torch.Tensor._make_subclass(cls, data, False)
        made.bits = bits
        return made

    def cuda(self, *_where: Any) -> Any:
        self.data = self.data.to("cuda").view(-1)[::2].contiguous().to(torch.uint8)
        return self


def test_a_parameter_of_a_class_of_its_own_keeps_the_class_where_it_moves() -> None:
    with fxmem.record(gpu="a100-80gb"):
        layer = nn.Linear(64, 64, bias=False)
        layer.weight = Packed(layer.weight.data)
        layer.cuda()
        weight = layer.weight
        assert isinstance(weight, Packed) and isinstance(weight, nn.Parameter)
        assert (weight.bits, weight.shape, weight.dtype) == (4, (2048,), torch.uint8)
        assert weight.device.type == "cuda"
        assert isinstance(Packed(weight.data), Packed)
        assert not isinstance(weight + 1, Packed)
