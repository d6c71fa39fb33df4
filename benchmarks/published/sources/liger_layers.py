"""Layers in plain PyTorch beside which Liger-Kernel measures its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.published.cases import Case
from benchmarks.published.sources.liger import (
    CUDA,
    Config,
    Kernel,
    Setup,
    find_dtype,
    make_input,
    predict_figures,
    start_from,
    start_from_random,
)
from benchmarks.published.sources.liger_rotary import set_up_llama4, set_up_qwen2vl, set_up_rope


def predict(case: Case) -> dict[str, int]:
    """The peaks of a case."""
    return predict_figures(case, SETUPS)


def _set_up_embedding(config: Config) -> Kernel:
    sizes = config["rows"], config["columns"]
    layer, other = (nn.Embedding(*sizes).to(CUDA) for _ in range(2))
    ids = torch.randint(0, config["rows"], config["ids"], device=CUDA)
    return Kernel(
        lambda: layer(ids), lambda output: output.backward(torch.randn_like(output)), (other,)
    )


def _set_up_layer(
    config: Config, make: Callable[[], nn.Module], twins: Callable[[], Any] = lambda: ()
) -> Kernel:
    """A layer of one input, as one of the two kinds of scripts runs it.

    Args:
        config: Says which kind: the shared harness has no layer but the one measured and makes
            gradients as it goes; the older scripts have Liger's too, and make the gradient before.
        make: Makes the layer.
        twins: Makes parameters as Liger's layer has them.
    """
    if config.get("shared_harness"):
        inputs = make_input(config)
        layer = make().to(CUDA)
        return Kernel(lambda: layer(inputs), start_from_random)
    other, layer = twins(), make().to(CUDA)
    inputs = make_input(config, requires_grad=False)
    gradient = torch.randn_like(inputs)
    inputs.requires_grad_(True)
    return Kernel(lambda: layer(inputs), start_from(gradient), (other,))


def _make_vectors(count: int, size: int) -> list[Tensor]:
    return [torch.ones(size, device=CUDA) for _ in range(count)]


def _set_up_layer_norm(config: Config) -> Kernel:
    size = config["shape"][-1]
    dtype = find_dtype(config) if config.get("shared_harness") else torch.float32
    return _set_up_layer(
        config, lambda: nn.LayerNorm(size).to(CUDA).to(dtype), lambda: _make_vectors(2, size)
    )


def _set_up_group_norm(config: Config) -> Kernel:
    channels = config["shape"][1]
    return _set_up_layer(
        config,
        lambda: nn.GroupNorm(config["groups"], channels).to(CUDA, find_dtype(config)),
        lambda: _make_vectors(2, channels),
    )


class LlamaNorm(nn.Module):
    """RMSNorm as Llama's first implementation in transformers has it: in float32, step by step."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape and dtype."""
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        return self.weight * x.to(dtype)


def _set_up_rms_norm(config: Config) -> Kernel:
    size = config["shape"][-1]
    return _set_up_layer(config, lambda: LlamaNorm(size), lambda: _make_vectors(1, size))


class AddNorm(LlamaNorm):
    """The residual added first, in float32 too."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The norm and the sum."""
        dtype = x.dtype
        x = x.to(torch.float32)
        residual = residual.to(torch.float32)
        x = x + residual
        residual = x
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        return self.weight * x.to(dtype), residual.to(dtype)


def _set_up_add_norm(config: Config) -> Kernel:
    size = config["shape"][-1]
    if config.get("shared_harness"):
        x, residual = make_input(config), make_input(config)
        layer = AddNorm(size).to(CUDA)
        return Kernel(lambda: layer(x, residual)[0], start_from_random)
    layer, others = AddNorm(size).to(CUDA), _make_vectors(3, size)
    x, residual = (make_input(config, requires_grad=False) for _ in range(2))
    gradients = torch.randn_like(x), torch.randn_like(residual)
    x.requires_grad_(True)
    residual.requires_grad_(True)
    return Kernel(
        lambda: layer(x, residual),
        lambda outputs: torch.autograd.backward(outputs, gradients),
        (others,),
    )


def _set_up_softmax(config: Config) -> Kernel:
    return _set_up_pointwise(config, nn.Softmax(dim=-1))


def _set_up_relu_squared(config: Config) -> Kernel:
    return _set_up_pointwise(config, _square_relu)


def _square_relu(x: Tensor) -> Tensor:
    relu = functional.relu(x)
    return torch.square(relu)


def _set_up_pointwise(config: Config, function: Callable[[Tensor], Tensor]) -> Kernel:
    """The older scripts give ones for a gradient."""
    x = make_input(config)
    if config.get("shared_harness"):
        return Kernel(lambda: function(x), start_from_random)
    return Kernel(lambda: function(x), lambda y: y.backward(torch.ones_like(y), retain_graph=True))


class Sparsemax(nn.Module):
    """Projection of the last dimension onto the simplex, by sorting."""

    def forward(self, x: Tensor) -> Tensor:
        """The same shape and dtype."""
        ordered, _ = torch.sort(x, dim=-1, descending=True)
        sums = torch.cumsum(ordered, dim=-1)
        size = x.size(-1)
        ranks = torch.arange(1, size + 1, device=x.device, dtype=x.dtype).view(1, size)
        bounds = 1 + ranks * ordered
        support = bounds > sums
        count = support.sum(dim=-1, keepdim=True).clamp(min=1)
        support_sum = (ordered * support).sum(dim=-1, keepdim=True)
        threshold = (support_sum - 1) / count
        return torch.clamp(x - threshold, min=0)


def _set_up_sparsemax(config: Config) -> Kernel:
    return _set_up_layer(config, Sparsemax)


class DynamicTanh(nn.Module):
    """A tanh with a scale before and an affine map after, in place of a norm."""

    def __init__(self, size: int, *, beta: bool) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1) * 0.5)
        self.gamma = nn.Parameter(torch.ones(size))
        self.beta = nn.Parameter(torch.zeros(size)) if beta else None

    def forward(self, x: Tensor) -> Tensor:
        """The same shape; float32, as the parameters are."""
        if self.beta is None:
            return self.gamma * torch.tanh(x * self.alpha)
        return self.gamma * torch.tanh(x * self.alpha) + self.beta


def _set_up_dynamic_tanh(config: Config) -> Kernel:
    return _set_up_layer(config, lambda: DynamicTanh(config["shape"][-1], beta=config["beta"]))


class PolynomialNorm(nn.Module):
    """A weighted sum of the first three powers, each normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 1 / 3))
        self.bias = nn.Parameter(torch.tensor(1.0))

    def _normalise(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape and dtype."""
        dtype = x.dtype
        x = x.to(torch.float32)
        third = x**3
        second = x**2
        first = x**1
        third_norm = self._normalise(third)
        second_norm = self._normalise(second)
        first_norm = self._normalise(first)
        weight = self.weight
        output = (
            weight[0] * third_norm + weight[1] * second_norm + weight[2] * first_norm + self.bias
        )
        return output.to(dtype)


def _set_up_polynomial_norm(config: Config) -> Kernel:
    return _set_up_layer(config, PolynomialNorm)


def _sum_backward(output: Tensor) -> None:
    output.sum().backward()


def _set_up_megatron_norm(config: Config) -> Kernel:
    layer = nn.RMSNorm(config["shape"][-1], eps=1e-6).to(CUDA).to(find_dtype(config))
    x = make_input(config)
    return Kernel(lambda: layer(x), _sum_backward)


def _set_up_megatron_swiglu(config: Config) -> Kernel:
    x = make_input(config)

    def forward() -> Tensor:
        x.grad = None
        return _gate(x)

    return Kernel(forward, _sum_backward)


def _gate(x: Tensor) -> Tensor:
    gate, up = torch.chunk(x, 2, -1)
    return functional.silu(gate) * up


SETUPS: dict[str, Setup] = {
    "embedding": _set_up_embedding,
    "layer_norm": _set_up_layer_norm,
    "group_norm": _set_up_group_norm,
    "rms_norm": _set_up_rms_norm,
    "fused_add_rms_norm": _set_up_add_norm,
    "rope": set_up_rope,
    "llama4_rope": set_up_llama4,
    "qwen2vl_mrope": set_up_qwen2vl,
    "softmax": _set_up_softmax,
    "relu_squared": _set_up_relu_squared,
    "sparsemax": _set_up_sparsemax,
    "dyt": _set_up_dynamic_tanh,
    "poly_norm": _set_up_polynomial_norm,
    "megatron_rms_norm": _set_up_megatron_norm,
    "megatron_swiglu": _set_up_megatron_swiglu,
}
