"""Feed-forward layers in plain PyTorch beside which Liger-Kernel measures its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from benchmarks.published.cases import Case
from benchmarks.published.sources.liger import (
    CUDA,
    Config,
    Kernel,
    Setup,
    find_dtype,
    make_input,
    predict_figures,
    start_from_random,
)


def predict(case: Case) -> dict[str, int]:
    """The peaks of a case: of both passes, and of each alone."""
    return predict_figures(case, SETUPS)


def _make_mlp(config: Config) -> nn.Module:
    settings = LlamaConfig(
        hidden_size=config["shape"][-1],
        intermediate_size=config["intermediate_size"],
        hidden_act=config["activation"],
    )
    layer: nn.Module = LlamaMLP(settings).to(CUDA).to(find_dtype(config))
    return layer


def _set_up_mlp(config: Config) -> Kernel:
    x = make_input(config)
    layer = _make_mlp(config)
    return Kernel(lambda: layer(x), start_from_random)


class Tiled(torch.autograd.Function):
    """A layer on one piece of the input after the other, computed again in backward.

    DeepSpeed's: the pieces' gradients are written into one buffer.
    """

    @staticmethod
    def forward(ctx: Any, layer: Callable[[Tensor], Tensor], x: Tensor, count: int) -> Tensor:
        """The layer's output, without a graph."""
        ctx.layer, ctx.count = layer, count
        ctx.save_for_backward(x)
        pieces = list(torch.chunk(x, count, dim=-2))
        with torch.no_grad():
            outputs = [layer(piece) for piece in pieces]
        return torch.cat(outputs, dim=-2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The input's gradient; those of parameters are added up on the way."""
        (x,) = ctx.saved_tensors
        x = x.detach()
        x.requires_grad_(True)
        shape = x.shape
        x = x.view(-1, shape[-1])
        incoming = gradients[0].view(-1, shape[-1])
        total = torch.zeros_like(x)
        pieces = list(torch.chunk(x, ctx.count, dim=0))
        for index, piece in enumerate(pieces):
            piece.requires_grad_(True)
            rows = piece.shape[0]
            at = index * pieces[0].shape[0]
            piece.grad = total.narrow(0, at, rows).view_as(piece)
            of_piece = incoming.narrow(0, at, rows).view_as(piece)
            with torch.enable_grad():
                output = ctx.layer(piece)
            torch.autograd.backward(output, of_piece)
        return None, total.view(shape), None


def _set_up_tiled_mlp(config: Config) -> Kernel:
    x = make_input(config)
    layer = _make_mlp(config)
    return Kernel(lambda: Tiled.apply(layer, x, config["shards"]), start_from_random)


def _set_up_experts(config: Config) -> Kernel:
    """One expert after the other, each for the tokens that have chosen it."""
    tokens, experts, chosen = config["tokens"], config["experts"], config["chosen"]
    size, width = config["hidden_size"], config["intermediate_size"]
    x = make_input(config, tokens, size)
    gate_up = make_input(config, experts, 2 * width, size) * 0.02
    down = make_input(config, experts, size, width) * 0.02
    logits = torch.randn(tokens, experts, device=CUDA)
    index = torch.topk(logits, chosen, dim=-1).indices.to(torch.int32)
    weights = torch.softmax(torch.gather(logits, 1, index.long()), dim=-1)
    weights = weights.to(find_dtype(config)).requires_grad_(True)
    del logits

    def forward() -> Tensor:
        return _run_experts(x, gate_up, down, index, weights)

    return Kernel(forward, start_from_random)


def _run_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    tokens, experts, count = x.shape[0], gate_up.shape[0], index.numel() // gate_up.shape[0]
    final = torch.zeros_like(x)
    with torch.no_grad():
        mask = torch.zeros(tokens, index.shape[1], experts, dtype=torch.int64, device=CUDA)
        mask = mask.permute(2, 1, 0)
        hit = torch.zeros(experts, 1, dtype=torch.int64, device=CUDA)
    for expert in range(len(hit)):
        # Where the mask is not zero: a pair for each token.
        position, token = torch.zeros(count, 2, dtype=torch.int64, device=CUDA).unbind(1)
        current = x[token]
        gate, up = functional.linear(current, gate_up[expert]).chunk(2, dim=-1)
        current = functional.silu(gate) * up
        current = functional.linear(current, down[expert])
        current = current * weights[token, position, None]
        final.index_add_(0, token, current.to(final.dtype))
    return final


SETUPS: dict[str, Setup] = {
    "mlp": _set_up_mlp,
    "tiled_mlp": _set_up_tiled_mlp,
    "fused_moe": _set_up_experts,
}
