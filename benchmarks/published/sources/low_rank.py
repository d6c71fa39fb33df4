"""LoRA as in peft: a frozen linear layer, and a product of two small ones beside it."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn


class LowRank(nn.Module):
    """A linear layer with an adapter, whose weights are float32 as peft makes them."""

    def __init__(self, base: nn.Linear, rank: int, dropout: float) -> None:
        super().__init__()
        self.base = base
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=torch.float32)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=torch.float32)
        self.scaling = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """As the linear layer's, in its dtype."""
        result = self.base(x)
        dtype = result.dtype
        x = x.to(self.down.weight.dtype)
        result = result + self.up(self.down(self.dropout(x))) * self.scaling
        return result.to(dtype)


def add_adapters(model: nn.Module, names: Collection[str], rank: int, dropout: float) -> None:
    """Freezes a model, and gives adapters to the linear layers of these names."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(module, name, LowRank(child, rank, dropout))
