"""Memory of optimizers on CUDA while they step, by hand from ``torch/optim``.

CUDA's default is to update all parameters at once (``_default_to_fused_or_foreach``), but for
Adafactor, whose default is one after the other on any device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_steps import hold, lower_for_cuda, made
from torch import nn

from fxmem import analyze
from fxmem.errors import TraceError
from fxmem.fakes.fake_mode import make_fake_mode
from fxmem.graph import Category, Phase
from fxmem.kernels.autocast.grad_scaler import GradScaler
from fxmem.kernels.cuda.gpu import is_on_gpu

ROWS, COLUMNS = 128, 256
W, B = ROWS * COLUMNS * 4, ROWS * 4
"""Bytes of the weight and of the bias."""
N = W + B
SCALARS = 2 * 4
"""A float for each parameter."""
# bitsandbytes: a byte for each element of a weight, a float for each 256; both states of a bias of
# fewer than 4096 elements are floats; two maps of 256 codes.
STATES_OF_8_BITS = 2 * (W // 4 + W // 4 // 256 * 4) + 2 * B + 2 * 256 * 4


@pytest.mark.parametrize(
    ("optimizer", "state", "held"),
    [
        # sgd.py, _multi_tensor_sgd: in place; weight decay makes new gradients (_foreach_add).
        ("sgd", 0, 0),
        ("sgd(weight_decay=0.1)", 0, N),
        ("sgd(fused=True)", 0, 0),
        ("sgd-momentum", N, 0),
        ("sgd-momentum(weight_decay=0.1)", N, N),
        ("sgd-nesterov", N, 0),
        # adam.py, _multi_tensor_adam: exp_avg_sq_sqrt. Gradients of another sign or with weight
        # decay are deleted before. Steps lie on the host unless capturable or fused.
        ("adam", 2 * N, N),
        ("adam(weight_decay=0.1)", 2 * N, N),
        ("adam(maximize=True)", 2 * N, N),
        ("adam(amsgrad=True)", 3 * N, N),
        ("adamw", 2 * N, N),
        # Both bias corrections, a scalar for each parameter.
        ("adam(capturable=True)", 2 * N + SCALARS, N + 2 * SCALARS),
        ("adam(fused=True)", 2 * N + SCALARS, 0),
        # _single_tensor_adam: the root of the weight's state, and its quotient. (The bias's come
        # while the weight's denominator still has its name.)
        ("adam(foreach=False)", 2 * N, 2 * W),
        # rmsprop.py, _multi_tensor_rmsprop: avg, and gradients with weight decay beside it.
        ("rmsprop", N, N),
        ("rmsprop(weight_decay=0.1)", N, 2 * N),
        ("rmsprop(momentum=0.9)", 2 * N, N),
        ("rmsprop(centered=True)", 2 * N, N),
        ("rmsprop(capturable=True)", N + SCALARS, N),
        ("rmsprop(foreach=False)", N, W + B),  # avg, the weight's beside the bias's
        # adagrad.py, _multi_tensor_adagrad: std and numerator, which takes the place of the
        # gradients that weight decay made.
        ("adagrad", N, 2 * N),
        ("adagrad(weight_decay=0.1)", N, 2 * N),
        ("adagrad(fused=True)", N + SCALARS, 0),
        # _adafactor.py, _single_tensor_adafactor: row_mean, col_mean and var_estimate of the
        # weight, beside grad_squared and variance's clone of the bias.
        ("adafactor", (ROWS + COLUMNS) * 4 + B, (ROWS + COLUMNS) * 4 + W + 2 * B),
        # _multi_tensor_adafactor: the means are deleted; the weight's updates have their name
        # until the bias's clone is there.
        ("adafactor(foreach=True)", (ROWS + COLUMNS) * 4 + B, W + B),
        # adamax.py: the gradients' magnitudes; capturable, bias corrections and denom.
        ("adamax", 2 * N, N),
        ("adamax(capturable=True)", 2 * N + SCALARS, 2 * N + SCALARS),
        # nadam.py: exp_avg_sq_sqrt; radam.py: buffer; adadelta.py: std and deltas.
        ("nadam", 2 * N, N),
        ("radam", 2 * N, N),
        ("adadelta", 2 * N, 2 * N),
        # rprop.py: the signs; where one is etaminus, a mask of bytes, what copy_ reads, and the 0
        # that torch.where puts on the GPU (TensorCompare.cpp, where).
        ("rprop", 2 * N, N + W // 4 + W + 4),
        # asgd.py: intermediate, twice one after the other; step, eta and mu lie on the GPU.
        ("asgd", N + 3 * SCALARS, N),
        ("adam8bit", STATES_OF_8_BITS, 0),
    ],
)
def test_what_is_held(optimizer: str, state: int, held: int) -> None:
    model = nn.Linear(COLUMNS, ROWS)
    graph = analyze(model, (f"2x{COLUMNS}",), device="cuda", optimizer=optimizer).graph
    states = [s for s in graph.storages if s.category is Category.OPTIMIZER_STATE]
    assert all(s.died is None for s in states)
    assert (sum(s.nbytes for s in states), hold(graph, Phase.OPTIMIZER)) == (state, held)


def test_muon_makes_a_matrix_orthogonal() -> None:
    """_muon.py: ``update`` in float; half of that, twice, and two squares of rows in bfloat16."""
    model = nn.Linear(COLUMNS, ROWS, bias=False)
    graph = analyze(model, (f"2x{COLUMNS}",), device="cuda", optimizer="muon").graph
    states = [s.nbytes for s in graph.storages if s.category is Category.OPTIMIZER_STATE]
    square = ROWS * ROWS * 2
    assert (states, hold(graph, Phase.OPTIMIZER)) == ([W], W + 2 * (W // 2) + 2 * square)


def test_the_peak_of_a_step_that_is_all_optimizer() -> None:
    """AdamW's peak: parameters, gradients, two states, the roots; the rest is small."""
    analysis = analyze(nn.Linear(4096, 4096), ("1x4096",), device="cuda", optimizer="adamw")
    assert analysis.peak.phase is Phase.OPTIMIZER
    weights = 4096 * 4096 * 4
    # A bias, an input, an output of 4096 floats; the loss in a block of 512 bytes, and cuBLAS's
    # workspaces, of two threads.
    row, workspaces = 4096 * 4, analysis.breakdown[Category.WORKSPACE]
    assert analysis.peak_bytes == 5 * (weights + row) + 2 * row + 512 + workspaces


# -- The gradient scaler of a float16 step: what it allocates, and that the optimizer steps --

# _unscale_grads_ takes a copy of found_inf and of inv_scale for the device
# (_MultiDeviceReplicator.get, ``copy=True``).
UNSCALE = [
    *(("_to_copy", 8), ("reciprocal", 8), ("_to_copy", 4)),  # inv_scale, by way of float64
    *(("full", 4), ("_to_copy", 4), ("_to_copy", 4)),  # found_inf, and the copies of both
]
# _check_inf_per_device: an inverse of 1 and found_inf, and their copies; in ``step`` the sum of
# found_inf, which begins with 0, and the scale times 1. Both are attributes of the optimizer while
# it steps, and the kernel unscales.
CHECK = [*[("full", 4)] * 2, *[("_to_copy", 4)] * 2, ("add", 4), ("mul", 4)]


@pytest.mark.parametrize(
    ("optimizer", "operators", "held"),
    [
        # Four scalars at once, found_inf and inv_scale with their copies.
        ("sgd", UNSCALE, 16),
        # The copy of found_inf lives until ``update``.
        ("adamw", [*UNSCALE, ("_foreach_sqrt", N)], N + 4),
        ("adamw(fused=True)", CHECK, 16),
        ("sgd(fused=True)", CHECK, 16),
    ],
)
def test_a_whole_step(optimizer: str, operators: list[tuple[str, int]], held: int) -> None:
    settings: Any = {"autocast": "fp16", "optimizer": optimizer}
    graph = analyze(nn.Linear(256, 128), ("2x256",), device="cuda", **settings).graph
    # ``scale(loss)``: the product with the scale, whose backward saves that.
    assert made(graph, Phase.LOSS) == [("sum", 4), ("mul", 4)]
    assert made(graph, Phase.OPTIMIZER) == operators
    assert hold(graph, Phase.OPTIMIZER) == held
    own = [s for s in graph.storages if s.name == "gradient scaler"]
    assert [(s.nbytes, s.dtype, s.category) for s in own] == [
        (4, "float32", Category.OPTIMIZER_STATE),
        (4, "int32", Category.OPTIMIZER_STATE),
    ]
    # Gradients are unscaled in place: they are of float32, like the parameters.
    gradients = [s.nbytes for s in graph.storages if s.category is Category.GRADIENT]
    assert sum(gradients) == N


class Told(torch.optim.AdamW):
    """Fails unless the scaler left it scale and found_inf."""

    def step(self, closure: Any = None) -> Any:
        for scalar in (self.grad_scale, self.found_inf):
            assert is_on_gpu(scalar) and scalar.shape == () and scalar.dtype == torch.float32
        return super().step(closure)


def test_the_fused_kernel_is_told_scale_and_found_inf() -> None:
    def make(parameters: Any) -> Told:
        return Told(parameters, fused=True)

    graph = analyze(nn.Linear(8, 4), ("2x8",), device="cuda", autocast="fp16", optimizer=make).graph
    assert "aten._fused_adamw_.default" in {operation.name for operation in graph.operations}
    with pytest.raises(TraceError, match="'Told' object has no attribute 'grad_scale'"):
        analyze(nn.Linear(8, 4), ("2x8",), device="cuda", autocast="bf16", optimizer=make)


def test_each_micro_batch_s_loss_is_scaled() -> None:
    settings: Any = {"autocast": "fp16", "optimizer": "sgd", "accumulate": 2}
    graph = analyze(nn.Linear(8, 4), ("2x8",), device="cuda", **settings).graph
    # Unscaled once.
    assert made(graph, Phase.OPTIMIZER) == UNSCALE


def test_gradients_in_float16_are_refused() -> None:
    with make_fake_mode(), lower_for_cuda():
        model, scaler = nn.Linear(8, 4, device="cuda", dtype=torch.float16), GradScaler()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.empty(2, 8, device="cuda", dtype=torch.float16)
        scaler.scale(model(x).sum()).backward()
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            scaler.step(optimizer)
