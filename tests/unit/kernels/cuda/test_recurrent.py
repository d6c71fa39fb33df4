"""Recurrent networks and cells on CUDA: buffers of weights, reserves, and what autocast casts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cuda_steps import Watch, made, run_step, saved, workspaces
from saved_sets.networks import Recurrent
from torch import Tensor, nn

from fxmem import analyze
from fxmem.fakes.fake_mode import make_fake_mode
from fxmem.graph import Category, MemoryGraph, Phase
from fxmem.kernels.autocast.dispatch import lower_autocast
from fxmem.kernels.cuda.gpu import GPU_DEVICE
from fxmem.kernels.cuda.recurrent import estimate_reserve_bytes, estimate_workspace_bytes

pytestmark = pytest.mark.usefixtures("shown_gpu")  # else autocast stays off

aten = torch.ops.aten
FP16, FP32 = torch.float16, torch.float32
STEPS, BATCH, INPUT, HIDDEN = 10, 8, 16, 32
STATE = BATCH * HIDDEN * 4
"""Bytes of a state of floats."""


def analyse(kind: type[nn.RNNBase] = nn.LSTM, mode: str = "train", **settings: Any) -> MemoryGraph:
    sizes = f"{STEPS}x{BATCH}x{INPUT}"
    return analyze(Recurrent(kind, 2, **settings), (sizes,), device="cuda", mode=mode).graph


# The buffer has room for biases that there are none of.
@pytest.mark.parametrize(
    ("kind", "gates", "bias"),
    [(nn.LSTM, 4, True), (nn.LSTM, 4, False), (nn.GRU, 3, True), (nn.RNN, 1, True)],
)
def test_weights_and_their_gradients_are_one_buffer_each(kind: Any, gates: int, bias: bool) -> None:
    # Rows of gates, times input + hidden + two biases; the second layer takes the first's output.
    nbytes = 4 * (gates * HIDDEN) * ((INPUT + HIDDEN + 2) + (HIDDEN + HIDDEN + 2))
    storages = analyse(kind, bias=bias).storages
    for category in (Category.PARAMETER, Category.GRADIENT):
        assert [s.nbytes for s in storages if s.category is category] == [nbytes]


class Flattened(nn.Module):
    """What ``flatten_parameters`` calls where PyTorch is built with cuDNN."""

    def forward(self, x: Tensor) -> Tensor:
        weights = [x.new_empty(shape) for shape in ((32, 16), (32, 8), (32,), (32,))]
        with torch.no_grad():
            flat = torch._cudnn_rnn_flatten_weight(weights, 4, 16, 2, 8, 0, 1, False, False)
        assert {weight.untyped_storage()._cdata for weight in (*weights, flat)} == {
            flat.untyped_storage()._cdata
        }
        return torch.nn.functional.linear(x, weights[0])


def test_weights_flattened_by_cudnn_share_one_buffer() -> None:
    graph = analyze(Flattened(), ("8x16",), device="cuda", mode="infer").graph
    assert 4 * 32 * (16 + 8 + 1 + 1) in {storage.nbytes for storage in graph.storages}


@pytest.mark.parametrize(("mode", "reported_bytes"), [(2, 736_000_000), (3, 864_000_000)])
def test_the_reserve_is_what_cudnn_reported(mode: int, reported_bytes: int) -> None:
    x = torch.empty(1000, 25, 123, device="meta")
    call = (None,) * 6 + (mode, 320, 0, 4, False, 0.0, True, False)
    assert estimate_reserve_bytes(x, call) == reported_bytes + 256  # of later releases


@pytest.mark.parametrize(
    ("kind", "dtype", "train", "workspace_bytes", "reserve_bytes"),
    [
        # Measured on an H200: tests/data/cuda, lstm-b64-* and gru_bidirectional-b64-*.
        (nn.LSTM, torch.float32, True, 91_833_088, 36_147_456),
        (nn.LSTM, torch.bfloat16, True, 54_305_536, 18_125_056),
        (nn.GRU, torch.float32, True, 100_737_792, 39_321_856),
        (nn.GRU, torch.bfloat16, True, 58_757_888, 19_661_056),
        (nn.LSTM, torch.float32, False, 88_556_288, None),
        (nn.GRU, torch.float32, False, 98_214_656, None),
    ],
)
def test_workspace_and_reserve_are_those_measured(
    kind: Any, dtype: torch.dtype, train: bool, workspace_bytes: int, reserve_bytes: int | None
) -> None:
    x = torch.empty(64, 200, 48, dtype=dtype, device="meta")
    is_lstm = kind is nn.LSTM
    settings: dict[str, Any] = {"num_layers": 2, "dropout": 0.1} if is_lstm else {}
    module = kind(48, 64, batch_first=True, bidirectional=not is_lstm, device="meta", **settings)
    about = (2, 64, 0, 2, True, 0.1) if is_lstm else (3, 64, 0, 1, True, 0.0)
    call = (*(None,) * 6, *about, train, not is_lstm, ())
    weights = [*module.parameters()]
    assert estimate_workspace_bytes(x, call, weights) == workspace_bytes
    assert reserve_bytes is None or estimate_reserve_bytes(x, call) == reserve_bytes


def test_inference_reserves_nothing_and_batch_first_copies_the_input_inside() -> None:
    assert not [s for s in analyse(mode="infer").storages if s.dtype == "uint8"]
    found = [
        workspaces(analyse(batch_first=batch_first))["aten._cudnn_rnn.default"]
        for batch_first in (False, True)
    ]
    # Time comes first in the one, the batch in the other, of which cuDNN has a few states.
    states_bytes = 2 * HIDDEN * 8 * (STEPS - BATCH) * 4
    assert found[1] - found[0] == 4 * STEPS * BATCH * INPUT + states_bytes


def test_the_state_of_dropout_is_kept() -> None:
    with_dropout = {s.name: s.nbytes for s in analyse(dropout=0.1).storages}
    threads = 108 * 2048  # of an A100
    assert with_dropout["state of cuDNN's dropout"] == threads * 24
    assert "state of cuDNN's dropout" not in {s.name for s in analyse().storages}


# -- Cells, against ``RNN.cpp`` and ``cuda/RNN.cu`` --


def leaf(rows: int = BATCH) -> Tensor:
    return torch.zeros(rows, INPUT, requires_grad=True)


# A state of zeros, which is an LSTM's cell too; both products; state, cell and gates. Backward:
# gradients of gates and cell or state, and sums for the biases (of an LSTM one sum for both).
@pytest.mark.parametrize(
    ("kind", "gates", "kept", "backward", "bias_sums"),
    [
        (nn.LSTMCell, 4, 2 * STATE + 4 * STATE, 4 * STATE + STATE, 4 * HIDDEN * 4),
        (nn.GRUCell, 3, STATE + 5 * STATE, 2 * 3 * STATE + STATE, 2 * 3 * HIDDEN * 4),
    ],
)
def test_a_cell(kind: Any, gates: int, kept: int, backward: int, bias_sums: int) -> None:
    fused = "_thnn_fused_lstm_cell" if gates == 4 else "_thnn_fused_gru_cell"
    graph = run_step(Recurrent(kind), leaf())
    products = [("mm", gates * STATE)] * 2
    assert made(graph) == [("zeros", STATE), *products, (fused, kept)]
    for biased in (True, False):
        made_backward = made(run_step(Recurrent(kind, bias=biased), leaf()), Phase.BACKWARD)
        (found,) = (nbytes for name, nbytes in made_backward if "fused" in name)
        assert found == backward + biased * bias_sums
    inferred = run_step(Recurrent(kind), torch.zeros(BATCH, INPUT), mode="infer")
    assert saved(inferred) == [] and "fused" in made(inferred)[-1][0]
    cast = analyze(Recurrent(kind), (leaf(),), device="cuda", autocast="bf16").graph
    born = [s for s in cast.storages if s.born >= 0]
    types = {s.dtype for s in born if "fused" in cast.operations[s.born].name}
    assert types == {"bfloat16"}


def test_many_rows_are_summed_with_a_buffer() -> None:
    # Where few columns have many rows, several blocks share a column (test_reduction.py).
    found = workspaces(run_step(Recurrent(nn.LSTMCell), leaf(65536)))
    assert any("backward_impl" in name for name in found)


def test_the_host_has_cells_of_the_cpu() -> None:
    def call(x: Tensor) -> Tensor:
        state, ones = torch.ones(BATCH, HIDDEN), torch.ones(BATCH, INPUT)
        four, three = (
            [torch.ones(gates * HIDDEN, size) for size in (INPUT, HIDDEN)] for gates in (4, 3)
        )
        lstm = torch.lstm_cell(ones, [state, state], *four)[0]
        return x + (lstm.sum() + torch.gru_cell(ones, state, *three).sum()).to(x.device)

    operators = {o.name for o in run_step(call, leaf()).operations}
    assert not any("fused" in operator for operator in operators)
    assert any("sigmoid" in operator for operator in operators)


# -- cuDNN's networks under autocast: what is cast, flattened, saved, and given back --

MODES = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}
T, B, W, H = 5, 2, 3, 4


@pytest.fixture
def lowered() -> Iterator[None]:
    with make_fake_mode(), lower_autocast():
        yield


def make_arguments(module: nn.RNNBase, dtype: torch.dtype = FP32) -> list[Any]:
    """Those of ``_cudnn_rnn``, with weights that do not lie in one buffer."""
    weights = [p.detach().to(GPU_DEVICE, dtype).requires_grad_() for p in module.parameters()]
    layers = module.num_layers * (2 if module.bidirectional else 1)
    x = torch.empty(T, B, W, device=GPU_DEVICE, dtype=dtype)
    hx = torch.empty(layers, B, module.proj_size or H, device=GPU_DEVICE, dtype=dtype)
    cx = torch.empty(layers, B, H, device=GPU_DEVICE, dtype=dtype)
    return [
        *(x, weights, len(weights) // layers, None, hx, cx if module.mode == "LSTM" else None),
        *(MODES[module.mode], H, module.proj_size, module.num_layers, False, 0.0, True),
        *(module.bidirectional, [], None),
    ]


def describe_copy(func: Any, args: Any, *_: Any) -> str | None:
    """Names a copy, a cast or zeros, with the number of elements."""
    if func not in (aten.zeros.default, aten.copy_.default, aten._to_copy.default):
        return None
    numel = args[0].numel() if isinstance(args[0], Tensor) else args[0][0]
    return f"{func.overloadpacket.__name__} {numel}"


@pytest.mark.usefixtures("lowered")
@pytest.mark.parametrize(
    ("module", "count"),
    [
        # gates * hidden rows of (width + hidden + 2) each; without biases their place stays
        (nn.LSTM(W, H, bias=False), 16 * (3 + 4 + 2)),
        # the second layer reads both directions of the first
        (nn.GRU(W, H, 2, bidirectional=True), 2 * 12 * (3 + 4 + 2) + 2 * 12 * (8 + 4 + 2)),
        # a projection from 4 to 2 is what recurs
        (nn.LSTM(W, H, 2, proj_size=2), 16 * (3 + 2 + 2) + 16 * (2 + 2 + 2) + 2 * 2 * 4),
    ],
)
def test_the_buffer_holds_all_weights(module: nn.RNNBase, count: int) -> None:
    args = make_arguments(module)
    with Watch(describe_copy) as watch, torch.autocast("cuda", dtype=FP16):
        aten._cudnn_rnn(*args)
    assert watch.calls[0] == f"zeros {count}"


@pytest.mark.usefixtures("lowered")
@pytest.mark.parametrize("dtype", [FP16, torch.bfloat16])
def test_everything_is_float16_whatever_the_dtype(dtype: torch.dtype) -> None:
    args = make_arguments(nn.LSTM(W, H))
    with Watch(describe_copy) as watch, torch.autocast("cuda", dtype=dtype):
        output, hy, cy, _, buffer = aten._cudnn_rnn(*args)
    assert {t.dtype for t in (output, hy, cy, buffer)} == {FP16}
    # The buffer, each weight into it (16x3, 16x4, 16, 16), then cx, hx and the input.
    assert watch.calls == [
        "zeros 144",
        *("copy_ 48", "copy_ 64", "copy_ 16", "copy_ 16"),
        *("_to_copy 8", "_to_copy 8", "_to_copy 30"),
    ]
    # Each weight gets a gradient of its own type.
    copies = [function for function, _ in output.grad_fn.next_functions if function is not None]
    assert [type(function).__name__ for function in copies] == ["CopyBackwards"] * 4
    gradient = copies[0](torch.empty(48, 1, dtype=FP16, device=GPU_DEVICE))[-1]
    assert gradient.dtype == FP32
    # What is of float16 already stays where it is.
    args = make_arguments(nn.LSTM(W, H), FP16)
    with Watch(describe_copy) as watch, torch.autocast("cuda", dtype=FP16):
        aten._cudnn_rnn(*args)
    assert watch.calls == []


@pytest.mark.usefixtures("lowered")
def test_what_autograd_saves() -> None:
    kept: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    )
    with torch.autocast("cuda", dtype=FP16), hooks:
        aten._cudnn_rnn(*make_arguments(nn.GRU(W, H)))
    # derivatives.yaml, _cudnn_rnn: input, weight, hx, result0, result3 (the reserve), result4 (the
    # buffer). The weights are parts of the buffer.
    buffer_bytes = 2 * 12 * (3 + 4 + 2)
    parts = [x.numel() for x in kept if x.untyped_storage().nbytes() == buffer_bytes]
    assert sorted(parts) == [12, 12, 12 * 3, 12 * 4, 12 * (3 + 4 + 2)]
    assert {x.dtype for x in kept} <= {FP16, torch.uint8}
