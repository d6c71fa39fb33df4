"""Attention, transformers and recurrent networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from saved_sets.row import H100, Row, row

F = nn.functional
_SHAPE = "2x4x32x16"
_FLOATS = f"{_SHAPE} {_SHAPE} {_SHAPE}"
_HALVES = f"{_SHAPE}:bfloat16 {_SHAPE}:bfloat16 {_SHAPE}:bfloat16"


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _attend_by_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def _attend_by_operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten.scaled_dot_product_attention(q, k, v)
    return result


def _attend_as_told(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    chosen = torch._fused_sdp_choice(q, k, v)
    assert chosen == SDPBackend.FLASH_ATTENTION.value
    result: Tensor = torch.ops.aten.scaled_dot_product_attention.default(q, k, v)
    return result


# derivatives.yaml, _scaled_dot_product_flash_attention: query, key, value, output, logsumexp (a
# float for each row), rng_state and unused (flash_api.cpp, mha_fwd: two numbers and one, of 64
# bits); the cumulated lengths are none.
_FLASH = "in0 in1 in2 2x4x32x16:bfloat16 2x4x32 2:uint64 :uint64"
_ATTENTION = (
    row("flash", _attend, _HALVES, _FLASH),
    row("flash, by its operator", _attend_by_operator, _HALVES, _FLASH),
    row("flash, by its overload", _attend_as_told, _HALVES, _FLASH),
    # _scaled_dot_product_efficient_attention: query, key, value, attn_bias, output, log_sumexp
    # (rows rounded up to 32), and seed and offset, which lie on the host (attention.cu).
    row("efficient", _attend, _FLOATS, "in0 in1 in2 2x4x32x16 2x4x32"),
    # _scaled_dot_product_cudnn_attention: the same with statistics of (batch, heads, rows, 1),
    # and seed and offset on the GPU (cudnn/MHA.cpp).
    row(
        "cuDNN",
        _attend,
        _HALVES,
        "in0 in1 in2 2x4x32x16:bfloat16 2x4x32x1 :int64 :int64",
        gpu=H100,
    ),
    # _scaled_dot_product_attention_math: both scaled factors, which matmul saves and with it the
    # weights after dropout and the value; _safe_softmax its result, dropout its mask. ``q * s``
    # saves nothing, s being a number. A matrix of keys that is transposed is made dense by mul.
    row(
        "math",
        _attend_by_products,
        _FLOATS,
        "2x4x32x16 2x4x16x32 in2 2x4x32x32 2x4x32x32:bool 2x4x32x32",
    ),
)


class Attention(nn.Module):
    """Attends to itself."""

    def __init__(self, *masks: str, dropout: float = 0.0, **settings: Any) -> None:
        super().__init__()
        self.core = nn.MultiheadAttention(64, 4, dropout=dropout, batch_first=True)
        for name in masks:
            self.register_buffer(name, settings.pop(name))
        self._masks, self._settings = masks, settings

    def forward(self, x: Tensor) -> Tensor:
        masks = {name: getattr(self, name) for name in self._masks}
        result: Tensor = self.core(x, x, x, **masks, **self._settings)[0]
        return result


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


_X = "2x10x64"
_WEIGHTS = "core.in_proj_weight core.out_proj.weight"
_MODULES = (
    # F.multi_head_attention_forward: time first, so that the rows of the first linear are copied
    # (matmul folds them); its result's parts go to one tensor (_in_projection_packed), which
    # efficient attention saves with its result and sums of 10 rows rounded up to 32; that, with
    # time first again, is copied for the last linear.
    row(
        "attention module",
        Attention(need_weights=False),
        _X,
        f"{_WEIGHTS} 10x2x64 3x10x2x64 2x4x10x16 2x4x32 10x2x4x16",
    ),
    # With weights, its default: the scaled queries and the keys are what the first product reads,
    # the weights after dropout and the values what the second one does; softmax and mask.
    row(
        "attention module with weights",
        Attention(need_weights=True, dropout=0.1),
        _X,
        f"{_WEIGHTS} 10x2x64 3x10x2x64 8x10x16 8x10x10 8x10x10:bool 8x10x10 10x8x16",
    ),
    # Beside those of fused attention: each dropout's mask, the sums that layer norms read, weights,
    # their statistics, the first one's result (which the first linear reads), relu's result, and it
    # after dropout.
    row(
        "encoder layer",
        nn.TransformerEncoderLayer(64, 4, 128, batch_first=True),
        _X,
        "self_attn.in_proj_weight self_attn.out_proj.weight linear1.weight linear2.weight "
        "norm1.weight norm1.bias norm2.weight norm2.bias "
        "10x2x64 3x10x2x64 2x4x10x16 2x4x32 10x2x4x16 2x10x64:bool 2x10x64:bool 2x10x128:bool "
        "2x10x64 2x10x64 2x10x64 2x10x1 2x10x1 2x10x1 2x10x1 2x10x128 2x10x128",
    ),
    # In inference nothing is saved: the layers' fast paths.
    row("attention module, inference", Attention(need_weights=True), _X, mode="infer"),
    row("encoder, inference", _encoder(), _X, mode="infer"),
)


class Recurrent(nn.Module):
    """A network or a cell that gives its outputs, and not its states."""

    def __init__(self, kind: type[nn.Module], *sizes: int, **settings: Any) -> None:
        super().__init__()
        self.core = kind(16, 32, *sizes, **settings)

    def forward(self, x: Tensor) -> Tensor:
        result = self.core(x)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output


# _cudnn_rnn: input, weight, hx, cx, result0 (the output), result3 (the reserve) and result4 (the
# buffer of the weights, which they are views of). The reserve: of each layer 5 states of each time
# step for LSTM, 6 for GRU, 1 for others, and the outputs of all layers but the last
# (github.com/pytorch/pytorch/issues/2895).
_ROWS = 10 * 8 * 32 * 4
"""Bytes of a state of all time steps."""
_KEPT = "in0 core.weight_ih_l0 2x8x32 10x8x32"


def _rnn(name: str, kind: type[nn.RNNBase], saved: str, x: str = "10x8x16", **more: Any) -> Row:
    return row(name, Recurrent(kind, 2, **more), x, saved)


_RECURRENT = (
    _rnn("LSTM", nn.LSTM, f"{_KEPT} 2x8x32 {_ROWS * (2 * 5 + 1) + 256}:uint8"),
    _rnn("GRU", nn.GRU, f"{_KEPT} {_ROWS * (2 * 6 + 1) + 256}:uint8"),
    # Twice as many directions, states and weights; outputs of both side by side.
    _rnn(
        "LSTM, both directions",
        nn.LSTM,
        f"in0 core.weight_ih_l0 4x8x32 4x8x32 10x8x64 {2 * _ROWS * (2 * 5 + 1) + 256}:uint8",
        bidirectional=True,
    ),
    # The batch first: what the kernel transposes is not what is saved.
    _rnn(
        "LSTM, batch first",
        nn.LSTM,
        f"in0 core.weight_ih_l0 2x8x32 2x8x32 8x10x32 {_ROWS * (2 * 5 + 1) + 256}:uint8",
        "8x10x16",
        batch_first=True,
    ),
    _rnn("RNN", nn.RNN, f"{_KEPT} {_ROWS * (2 * 1 + 1) + 256}:uint8"),
    _rnn("RNN, relu", nn.RNN, f"{_KEPT} {_ROWS * (2 * 1 + 1) + 256}:uint8", nonlinearity="relu"),
    # _pack_padded_sequence: result1, the sizes of the batches, which lie on the host.
    row(
        "packed sequence",
        lambda x: nn.utils.rnn.pack_padded_sequence(x, torch.tensor([10, 7, 2]))[0],
        "10x3x16",
    ),
)

# _thnn_fused_lstm_cell: input_gates, hidden_gates, input_bias, hidden_bias, cx, result1 (cy) and
# result2 (workspace, as large as the gates); hy is not. _thnn_fused_gru_cell: gates, biases, hx
# and result1 (workspace, five states). cuda/RNN.cu. Both products save input or state, and the
# weight of the input, which needs a gradient. Zeros are state and cell in one.
_CELL = "in0 core.weight_ih core.bias_ih core.bias_hh 8x32"
_CELLS = (
    row("LSTM cell", Recurrent(nn.LSTMCell), "8x16", f"{_CELL} 8x128 8x128 8x32 8x128"),
    row(
        "LSTM cell without biases",
        Recurrent(nn.LSTMCell, bias=False),
        "8x16",
        "in0 core.weight_ih 8x32 8x32 8x128 8x128 8x128",
    ),
    row("GRU cell", Recurrent(nn.GRUCell), "8x16", f"{_CELL} 8x96 8x96 8x160"),
)

ROWS = (*_ATTENTION, *_MODULES, *_RECURRENT, *_CELLS)
