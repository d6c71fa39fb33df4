"""cuDNN's recurrent networks under autocast: what is cast, flattened, saved, and given back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxmem.kernels.autocast.dispatch import lower_autocast
from fxmem.kernels.cuda.gpu import GPU_DEVICE
from fxmem.tracing.fakes import make_fake_mode

aten = torch.ops.aten
FP16, FP32 = torch.float16, torch.float32
MODES = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}
T, B, WIDTH, HIDDEN = 5, 2, 3, 4


@pytest.fixture(autouse=True)
def lowered() -> Iterator[None]:
    with make_fake_mode(), lower_autocast():
        yield


def make_arguments(module: nn.RNNBase, dtype: torch.dtype = FP32) -> list[Any]:
    """Those of ``_cudnn_rnn``, with weights that do not lie in one buffer."""
    weights = [p.detach().to(GPU_DEVICE, dtype).requires_grad_() for p in module.parameters()]
    layers = module.num_layers * (2 if module.bidirectional else 1)
    x = torch.empty(T, B, WIDTH, device=GPU_DEVICE, dtype=dtype)
    hx = torch.empty(layers, B, module.proj_size or HIDDEN, device=GPU_DEVICE, dtype=dtype)
    cx = torch.empty(layers, B, HIDDEN, device=GPU_DEVICE, dtype=dtype)
    return [
        *(x, weights, len(weights) // layers, None, hx, cx if module.mode == "LSTM" else None),
        *(MODES[module.mode], HIDDEN, module.proj_size, module.num_layers, False, 0.0, True),
        *(module.bidirectional, [], None),
    ]


@pytest.mark.parametrize(
    ("module", "count"),
    [
        # gates * hidden rows of (width + hidden + 2) each
        (nn.LSTM(WIDTH, HIDDEN), 16 * (3 + 4 + 2)),
        (nn.RNN(WIDTH, HIDDEN), 4 * (3 + 4 + 2)),
        # without biases their place stays
        (nn.LSTM(WIDTH, HIDDEN, bias=False), 16 * (3 + 4 + 2)),
        # the second layer reads both directions of the first
        (nn.GRU(WIDTH, HIDDEN, 2, bidirectional=True), 2 * 12 * (3 + 4 + 2) + 2 * 12 * (8 + 4 + 2)),
        # a projection from 4 to 2 is what recurs
        (nn.LSTM(WIDTH, HIDDEN, 2, proj_size=2), 16 * (3 + 2 + 2) + 16 * (2 + 2 + 2) + 2 * 2 * 4),
    ],
)
def test_the_buffer_holds_all_weights(module: nn.RNNBase, count: int) -> None:
    args = make_arguments(module)
    with Watch() as watch, torch.autocast("cuda", dtype=FP16):
        aten._cudnn_rnn(*args)
    assert watch.calls[0] == f"zeros {count}"


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.zeros.default, aten.copy_.default, aten._to_copy.default):
            numel = args[0].numel() if isinstance(args[0], Tensor) else args[0][0]
            self.calls.append(f"{func.overloadpacket.__name__} {numel}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [FP16, torch.bfloat16])
def test_everything_is_float16_whatever_the_dtype(dtype: torch.dtype) -> None:
    args = make_arguments(nn.LSTM(WIDTH, HIDDEN))
    with Watch() as watch, torch.autocast("cuda", dtype=dtype):
        output, hy, cy, _, buffer = aten._cudnn_rnn(*args)
    assert {t.dtype for t in (output, hy, cy, buffer)} == {FP16}
    # The buffer, each weight into it (16x3, 16x4, 16, 16), then cx, hx and the input.
    assert watch.calls == [
        "zeros 144",
        *("copy_ 48", "copy_ 64", "copy_ 16", "copy_ 16"),
        *("_to_copy 8", "_to_copy 8", "_to_copy 30"),
    ]


def test_what_autograd_saves() -> None:
    saved = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append((tensor.dtype, tensor.numel(), tensor.untyped_storage().nbytes()))
        return tensor

    args = make_arguments(nn.GRU(WIDTH, HIDDEN))
    with (
        torch.autocast("cuda", dtype=FP16),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        aten._cudnn_rnn(*args)
    # derivatives.yaml, _cudnn_rnn: input, weight, hx, result0, result3 (the reserve), result4 (the
    # buffer). The weights are parts of the buffer.
    parts = [numel for _, numel, nbytes in saved if nbytes == 2 * 12 * (3 + 4 + 2)]
    assert sorted(parts) == [12, 12, 12 * 3, 12 * 4, 12 * (3 + 4 + 2)]
    assert {dtype for dtype, *_ in saved} <= {FP16, torch.uint8}


def test_weights_get_gradients_of_their_own_type() -> None:
    args = make_arguments(nn.LSTM(WIDTH, HIDDEN))
    with torch.autocast("cuda", dtype=FP16):
        output = aten._cudnn_rnn(*args)[0]
    copies = [function for function, _ in output.grad_fn.next_functions if function is not None]
    assert [type(function).__name__ for function in copies] == ["CopyBackwards"] * 4
    gradient = copies[0](torch.empty(48, 1, dtype=FP16, device=GPU_DEVICE))[-1]
    assert gradient.dtype == FP32


def test_float16_stays_where_it_is() -> None:
    args = make_arguments(nn.LSTM(WIDTH, HIDDEN), FP16)
    with Watch() as watch, torch.autocast("cuda", dtype=FP16):
        aten._cudnn_rnn(*args)
    assert watch.calls == []
