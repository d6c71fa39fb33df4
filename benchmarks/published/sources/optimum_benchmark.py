"""Llama 2 in float16: one forward over 256 tokens, and greedy generation of 512 more.

As transformers 4.35 had it: cosines and sines of 4,096 positions in each layer, attention written
out, logits of all tokens in float32, and keys and values as tuples, which the next step
concatenates anew. So the last step of generation holds those of the step before and its own. The
tables' other implementations of attention (BetterTransformer, flash-attn) differ by up to 3 MB,
and GPTQ's weights are not predicted. Megabytes are cut off, so the middle of each is taken.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import fxmem
from benchmarks.published.cases import Case
from benchmarks.published.predicting import list_peaks

VOCABULARY, POSITIONS, HEAD = 32000, 4096, 128
PROMPT, NEW = 256, 512
SIZES = {"7b": (4096, 11008, 32), "13b": (5120, 13824, 40)}


class Norm(nn.Module):
    """Root mean square normalization, in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape and dtype."""
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * x.to(dtype)


def turn(x: Tensor) -> Tensor:
    """The halves of the last dimension swapped, one with its sign changed."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class Attention(nn.Module):
    """Attention written out, with rotary embeddings from tables of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.register_buffer("inv_freq", torch.ones(HEAD // 2, dtype=torch.float32))
        self.register_buffer("cosines", torch.ones(POSITIONS, HEAD))
        self.register_buffer("sines", torch.ones(POSITIONS, HEAD))

    def forward(
        self, x: Tensor, mask: Tensor, positions: Tensor, past: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The result, and keys and values of all positions so far."""
        batch, length, width = x.shape
        query, key, value = (
            layer(x).view(batch, length, -1, HEAD).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        total = length + (past[0].shape[2] if past else 0)
        cos, sin = self.cosines[:total][positions], self.sines[:total][positions]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        query, key = query * cos + turn(query) * sin, key * cos + turn(key) * sin
        if past:
            key, value = torch.cat((past[0], key), dim=2), torch.cat((past[1], value), dim=2)
        weights = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(HEAD)
        weights = weights + mask
        weights = torch.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
        result = torch.matmul(weights, value).transpose(1, 2).contiguous()
        return self.o_proj(result.reshape(batch, length, width)), key, value


class Layer(nn.Module):
    """Attention and a gated network of two layers, each behind a normalization."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(width)
        self.self_attn = Attention(width)
        self.post_attention_layernorm = Norm(width)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(
        self, x: Tensor, mask: Tensor, positions: Tensor, past: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As attention's."""
        residual = x
        x = self.input_layernorm(x)
        x, key, value = self.self_attn(x, mask, positions, past)
        x = residual + x
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return residual + x, key, value


def make_mask(attention_mask: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Makes the mask added to attention's weights, of shape (batch, 1, length, all positions)."""
    batch, total = attention_mask.shape
    expanded = attention_mask[:, None, None, :].expand(batch, 1, length, total).to(dtype)
    inverted = 1.0 - expanded
    padding = inverted.masked_fill(inverted.to(torch.bool), torch.finfo(dtype).min)
    if length == 1:
        return padding
    causal = torch.full((length, length), torch.finfo(dtype).min, device=padding.device)
    causal = causal.triu(1).to(dtype)
    return padding + causal[None, None].expand(batch, 1, length, length)


class Decoder(nn.Module):
    """All but the last projection, with keys and values as a flat tuple."""

    def __init__(self, width: int, inner: int, depth: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width, inner) for _ in range(depth))
        self.norm = Norm(width)

    def forward(
        self, tokens: Tensor, attention_mask: Tensor, past: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Hidden states, and keys and values of all positions."""
        length, total = tokens.shape[1], attention_mask.shape[1]
        positions = torch.arange(total - length, total, device=tokens.device).unsqueeze(0)
        x = self.embed_tokens(tokens)
        mask = make_mask(attention_mask, length, x.dtype)
        cache: tuple[Tensor, ...] = ()
        for index, layer in enumerate(self.layers):
            x, key, value = layer(x, mask, positions, past[2 * index : 2 * index + 2])
            cache += (key, value)
        return self.norm(x), cache


class Llama(nn.Module):
    """A causal model that takes and gives keys and values."""

    def __init__(self, size: str) -> None:
        super().__init__()
        width, inner, depth = SIZES[size]
        self.model = Decoder(width, inner, depth)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.half()
        for layer in self.model.layers:
            layer.self_attn.inv_freq = layer.self_attn.inv_freq.float()

    def forward(
        self, tokens: Tensor, attention_mask: Tensor, held: Tensor | None, *past: Tensor
    ) -> tuple[Tensor, ...]:
        """Logits in float32, and all keys and values; ``held`` is only held."""
        hidden, cache = self.model(tokens, attention_mask, past)
        logits = self.lm_head(hidden)
        logits = logits.float()
        return (logits, *cache)

    def generate(self, tokens: Tensor, max_new_tokens: int) -> Tensor:
        """Greedily, with the outputs of a step held until the next step's are there."""
        given, mask = tokens, torch.ones_like(tokens)
        past: tuple[Tensor, ...] = ()
        for _ in range(max_new_tokens):
            outputs = self(given, mask, None, *past)
            past = outputs[1:]
            given = outputs[0][:, -1, :].argmax(-1)[:, None]
            tokens = torch.cat([tokens, given], dim=-1)
            mask = torch.cat([mask, mask.new_ones((mask.shape[0], 1))], dim=-1)
        return tokens


def predict(case: Case) -> dict[str, int]:
    """The peak of a forward, of the last step of a generation, or of a whole one."""
    size, batch = case.config["model"], case.config["batch"]
    tokens = fxmem.TensorSpec((batch, PROMPT), "int64")
    model, options = f"{__name__}:Llama(size={size!r})", {"gpu": case.gpu, "alloc_conf": ""}
    if case.config["what"] == "whole generation":
        analysis = fxmem.analyze(model, tokens, mode="generate", new_tokens=NEW, **options)
    elif case.config["what"] == "forward":
        analysis = fxmem.analyze(model, (tokens, tokens, None), mode="infer", **options)
    else:
        width, _, depth = SIZES[size]
        total = PROMPT + NEW - 1
        past = fxmem.TensorSpec((batch, width // HEAD, total - 1, HEAD), "float16")
        args = (
            fxmem.TensorSpec((batch, 1), "int64"),
            fxmem.TensorSpec((batch, total), "int64"),
            fxmem.TensorSpec((batch, 1, VOCABULARY), "float32"),
            *[past] * (2 * depth),
        )
        analysis = fxmem.analyze(model, args, mode="infer", **options)
    return {"allocated": list_peaks(analysis)["allocated"]}
