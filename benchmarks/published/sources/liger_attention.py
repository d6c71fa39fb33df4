"""Attention in plain PyTorch beside which Liger-Kernel measures its own."""

from __future__ import annotations

import math

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
)


def predict(case: Case) -> dict[str, int]:
    """The peak of a case."""
    return predict_figures(case, SETUPS)


class MultiTokenAttention(nn.Module):
    """A convolution over masked attention's probabilities: queries and keys look at neighbours."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        channels, size = config["channels"], config["kernel_size"]
        shape = channels, channels, size, size
        self.weight = nn.Parameter(torch.empty(shape, dtype=find_dtype(config), device=CUDA))
        self.bias = nn.Parameter(torch.empty(channels, dtype=find_dtype(config), device=CUDA))

    def forward(self, scores: Tensor) -> Tensor:
        """From scores of batch x heads x queries x keys to the same shape."""
        mask = make_mask(scores)
        inf = torch.tensor(-1e9, device=scores.device, dtype=scores.dtype)
        zero = torch.tensor(0.0, device=scores.device, dtype=scores.dtype)
        masked = scores.masked_fill(~mask, inf)
        probabilities = functional.softmax(masked, dim=-1)
        output = functional.conv2d(
            probabilities, self.weight, self.bias, padding=self.weight.size(-1) // 2
        )
        return output.masked_fill(~mask, zero)


def make_mask(scores: Tensor) -> Tensor:
    """True where a query may look at a key."""
    length = scores.size(-1)
    ones = torch.ones(length, length, dtype=torch.bool, device=scores.device)
    return torch.tril(ones).view(1, 1, length, length)


class SparseMultiTokenAttention(MultiTokenAttention):
    """The same with sparsemax for softmax."""

    def forward(self, scores: Tensor) -> Tensor:
        """From scores of batch x heads x queries x keys to the same shape."""
        length = scores.size(-1)
        mask = make_mask(scores)
        inf = torch.tensor(-1e9, device=scores.device, dtype=torch.float32)
        zero = torch.tensor(0.0, device=scores.device, dtype=torch.float32)
        computed = scores.to(torch.float32)
        masked = computed.masked_fill(~mask, inf)
        z = masked
        ordered, _ = torch.sort(z, dim=-1, descending=True)
        sums = torch.cumsum(ordered, dim=-1)
        ranks = torch.arange(1, length + 1, device=z.device, dtype=z.dtype)
        ranks = ranks.view(1, 1, 1, length)
        is_there = ordered > -1e8
        condition = (1 + ranks * ordered > sums) & is_there
        support = torch.sum(condition, dim=-1, keepdim=True)
        at_least_one = torch.max(support, torch.ones_like(support))
        sums_there = torch.gather(sums, dim=-1, index=at_least_one.long() - 1)
        tau = (sums_there - 1) / at_least_one.to(z.dtype)
        tau = torch.where(support == 0, torch.full_like(tau, float("inf")), tau)
        probabilities = torch.clamp(z - tau, min=0)
        weight = self.weight.to(torch.float32)
        bias = self.bias.to(torch.float32)
        output = functional.conv2d(probabilities, weight, bias, padding=weight.size(-1) // 2)
        return output.masked_fill(~mask, zero).to(scores.dtype)


class NeighbourhoodAttention(nn.Module):
    """Attention written out, under a mask of neighbours."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        size = config["hidden_size"]
        self.heads = config["heads"]
        self.scale = 1.0 / math.sqrt(size // self.heads)
        self.q_proj = nn.Linear(size, size)
        self.k_proj = nn.Linear(size, size)
        self.v_proj = nn.Linear(size, size)
        self.out_proj = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        """From batch x length x channels to the same shape."""
        batch, length, size = x.shape
        split = batch, length, self.heads, size // self.heads
        query = self.q_proj(x)
        key = self.k_proj(x)
        value = self.v_proj(x)
        query = query.view(split).transpose(1, 2)
        key = key.view(split).transpose(1, 2)
        value = value.view(split).transpose(1, 2)
        scores = torch.matmul(query, key.transpose(-2, -1)) * self.scale
        # The script sets the neighbours one by one, in place.
        mask = torch.zeros(length, length, device=x.device, dtype=torch.bool)
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        output = torch.matmul(weights, value)
        output = output.transpose(1, 2).contiguous().view(batch, length, size)
        return self.out_proj(output)  # type: ignore[no-any-return]


def _set_up(config: Config, layer: nn.Module, twin: nn.Module, shape: tuple[int, ...]) -> Kernel:
    """A layer beside Liger's, which has parameters of the same shapes."""
    x = make_input(config, *shape, requires_grad=False)
    gradient = torch.randn_like(x)
    x.requires_grad_(True)
    return Kernel(lambda: layer(x), start_from(gradient), (twin,))


def _set_up_multi_token(config: Config) -> Kernel:
    return _set_up_scores(config, MultiTokenAttention)


def _set_up_sparse(config: Config) -> Kernel:
    return _set_up_scores(config, SparseMultiTokenAttention)


def _set_up_scores(config: Config, kind: type[MultiTokenAttention]) -> Kernel:
    twin, layer = MultiTokenAttention(config), kind(config)
    length = config["length"]
    return _set_up(config, layer, twin, (config["batch"], config["channels"], length, length))


def _set_up_neighbourhood(config: Config) -> Kernel:
    twin, layer = (NeighbourhoodAttention(config).to(CUDA) for _ in range(2))
    return _set_up(config, layer, twin, (config["batch"], config["length"], config["hidden_size"]))


SETUPS: dict[str, Setup] = {
    "multi_token_attention": _set_up_multi_token,
    "sparse_multi_token_attention": _set_up_sparse,
    "fused_neighborhood_attention": _set_up_neighbourhood,
}
