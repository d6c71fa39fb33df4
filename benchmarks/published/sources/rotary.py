"""Rotary embeddings of Mistral as earlier versions of transformers had them, in each layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Rotary embeddings as Mistral has them; its only buffer is the inverse frequencies."""

    inv_freq: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1e-4 ** (torch.arange(0, width, 2).float() / width))

    def forward(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of shape (1, length, width)."""
        frequencies = self.inv_freq[None, :, None].expand(position_ids.shape[0], -1, 1)
        with torch.autocast(hidden_states.device.type, enabled=False):
            angles = (frequencies @ position_ids[:, None, :].float()).transpose(1, 2)
            both = torch.cat((angles, angles), dim=-1)
            cos, sin = both.cos(), both.sin()
        return cos.to(hidden_states.dtype), sin.to(hidden_states.dtype)


class PerLayer(nn.Module):
    """An attention that makes its own rotary embeddings instead of taking the model's."""

    def __init__(self, attention: nn.Module, width: int) -> None:
        super().__init__()
        self.attention = attention
        self.rotary = Rotary(width)

    def forward(self, hidden_states: Tensor, position_ids: Tensor, **rest: Any) -> Any:
        """As the attention's."""
        rest["position_embeddings"] = self.rotary(hidden_states, position_ids)
        return self.attention(hidden_states=hidden_states, position_ids=position_ids, **rest)


class NoRotary(nn.Module):
    """In the place of the model's rotary embeddings, where layers have their own."""

    def forward(self, hidden_states: Tensor, position_ids: Tensor) -> None:
        """Nothing."""


def give_layers_rotary(model: Any) -> None:
    """Lets each layer of a Mistral without its head make rotary embeddings, as up to 4.45."""
    for layer in model.layers:
        layer.self_attn = PerLayer(layer.self_attn, layer.self_attn.head_dim)
    model.rotary_emb = NoRotary()
