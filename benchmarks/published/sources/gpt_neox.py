"""Pythia-410m as transformers 4.41 had it, with attention written out and with fused attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import fxmem
from benchmarks.published.cases import Case
from benchmarks.published.predicting import list_peaks

LAYERS, WIDTH, HEADS, HEAD, ROTARY, VOCABULARY, LENGTH = 24, 1024, 16, 64, 16, 50304, 2048
Kept = tuple[Tensor, Tensor]


def rotate(x: Tensor) -> Tensor:
    """The halves of the last dimension change places, one of them negated."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class Attention(nn.Module):
    """Attention whose query and key are rotated in float32."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("causal", torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool))
        self.register_buffer("cos", torch.zeros(LENGTH, ROTARY))
        self.register_buffer("sin", torch.zeros(LENGTH, ROTARY))

    def rotate_part(self, x: Tensor, positions: Tensor) -> Tensor:
        """A quarter of each head's dimensions is rotated; all come out in float32."""
        part, rest = x[..., :ROTARY], x[..., ROTARY:]
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        return torch.cat(((part * cos) + (rotate(part) * sin), rest), dim=-1)

    def weigh(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention written out, in float32 but for the product with the values."""
        batch, heads, tokens, _ = query.shape
        query = query.view(batch * heads, tokens, HEAD)
        key = key.view(batch * heads, tokens, HEAD)
        scores = torch.zeros(batch * heads, tokens, tokens, dtype=query.dtype, device=query.device)
        scores = torch.baddbmm(scores, query, key.transpose(1, 2), beta=1.0, alpha=HEAD**-0.5)
        scores = scores.view(batch, heads, tokens, tokens)
        least = torch.tensor(-1e9, dtype=scores.dtype, device=scores.device)
        scores = torch.where(self.causal[:, :, :tokens, :tokens], scores, least)
        weights = functional.softmax(scores, dim=-1)
        weights = weights.to(value.dtype)
        return torch.matmul(weights, value)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Kept]:
        """Its output, and the key and value that a cache would keep."""
        batch, tokens, _ = x.shape
        qkv = self.query_key_value(x).view(batch, tokens, HEADS, 3 * HEAD)
        query = qkv[..., :HEAD].permute(0, 2, 1, 3)
        key = qkv[..., HEAD : 2 * HEAD].permute(0, 2, 1, 3)
        value = qkv[..., 2 * HEAD :].permute(0, 2, 1, 3)
        query = self.rotate_part(query, positions)
        key = self.rotate_part(key, positions)
        kept = key, value
        if self.fused:
            query, key = query.to(value.dtype), key.to(value.dtype)
            out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            out = self.weigh(query, key, value)
        out = out.permute(0, 2, 1, 3).contiguous().view(batch, tokens, WIDTH)
        return self.dense(out), kept


class Layer(nn.Module):
    """Attention and an MLP side by side."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.input_norm = nn.LayerNorm(WIDTH)
        self.output_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention(fused)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Kept]:
        """Hidden states, and what a cache would keep."""
        attended, kept = self.attention(self.input_norm(x), positions)
        transformed = self.down(functional.gelu(self.up(self.output_norm(x))))
        return transformed + attended + x, kept


class NeoX(nn.Module):
    """From tokens to logits, and to the keys and values of all layers."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(fused) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, tuple[Kept, ...]]:
        """Tokens are of shape (batch, length)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        x = self.embedding(tokens)
        caches: tuple[Kept, ...] = ()
        for layer in self.layers:
            x, kept = layer(x, positions)
            caches += (kept,)
        return self.head(self.norm(x)), caches


def sum_logits(output: tuple[Tensor, object]) -> Tensor:
    """The benchmark's loss."""
    return output[0].sum()


def predict(case: Case) -> dict[str, int]:
    """The peak of forward and backward; the output of the step before is still held."""
    with torch.device("meta"):
        network = NeoX(case.config["attention"] == "sdpa")
        for parameter in network.parameters():
            parameter.data = parameter.data.half()  # buffers stay in float32
    analysis = fxmem.analyze(
        network,
        (fxmem.TensorSpec((case.config["batch"], case.config["tokens"]), "int64"),),
        gpu=case.gpu,
        loss=sum_logits,
        hold_outputs=True,
        alloc_conf="",
    )
    return {"allocated": list_peaks(analysis)["allocated"]}
