"""The gradient scaler of a float16 step: what it allocates, and that the optimizer steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_steps import hold, made
from torch import nn

from fxmem import analyze
from fxmem.errors import TraceError
from fxmem.graph import Category, Phase
from fxmem.kernels.autocast.grad_scaler import GradScaler
from fxmem.kernels.cuda import CUDA
from fxmem.kernels.cuda.gpu import is_on_gpu
from fxmem.kernels.functions import lower_functions
from fxmem.tracing.fakes import make_fake_mode

aten = torch.ops.aten


# Linear(256, 128): its parameters in float.
N = (128 * 256 + 128) * 4
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
    analysis = analyze(
        nn.Linear(256, 128), ("2x256",), device="cuda", autocast="fp16", optimizer=optimizer
    )
    graph = analysis.graph
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
    graph = analyze(
        nn.Linear(8, 4), ("2x8",), device="cuda", autocast="fp16", optimizer="sgd", accumulate=2
    ).graph
    # Unscaled once.
    assert made(graph, Phase.OPTIMIZER) == UNSCALE


def test_gradients_in_float16_are_refused() -> None:
    with make_fake_mode(), lower_functions(CUDA):
        model, scaler = nn.Linear(8, 4, device="cuda", dtype=torch.float16), GradScaler()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.empty(2, 8, device="cuda", dtype=torch.float16)
        scaler.scale(model(x).sum()).backward()
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            scaler.step(optimizer)
