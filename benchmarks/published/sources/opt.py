"""OPT-350m as transformers 4.45 had it, with attention written out and with fused attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import fxmem
from benchmarks.published.cases import Case
from benchmarks.published.predicting import list_peaks

LAYERS, WIDTH, HEADS, HEAD, EMBEDDED, VOCABULARY, POSITIONS = 24, 1024, 16, 64, 512, 50272, 2050
DROPOUT = 0.1
Kept = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Causal attention whose softmax is in float32 where it is written out."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.k_proj = nn.Linear(WIDTH, WIDTH)
        self.v_proj = nn.Linear(WIDTH, WIDTH)
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def weigh(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attention written out; the mask is added to the scores."""
        batch, _, tokens, _ = query.shape
        query = query.view(batch * HEADS, -1, HEAD)
        key = key.view(batch * HEADS, -1, HEAD)
        value = value.view(batch * HEADS, -1, HEAD)
        weights = torch.bmm(query, key.transpose(1, 2))
        weights = weights.view(batch, HEADS, tokens, tokens) + mask
        least = torch.tensor(
            torch.finfo(weights.dtype).min, dtype=weights.dtype, device=weights.device
        )
        weights = torch.max(weights, least)
        weights = weights.view(batch * HEADS, tokens, tokens)
        weights = functional.softmax(weights, dim=-1, dtype=torch.float32).to(torch.float16)
        out = torch.bmm(weights, value)
        return out.view(batch, HEADS, tokens, HEAD)

    def forward(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Kept]:
        """Its output, and the key and value that a cache would keep."""
        batch, tokens, _ = x.shape

        def split(x: Tensor) -> Tensor:
            return x.view(batch, -1, HEADS, HEAD).transpose(1, 2).contiguous()

        query = self.q_proj(x) * HEAD**-0.5
        key = split(self.k_proj(x))
        value = split(self.v_proj(x))
        query = split(query)
        if self.fused:
            out = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=1.0
            )
        else:
            out = self.weigh(query, key, value, mask)
        out = out.transpose(1, 2).reshape(batch, tokens, WIDTH)
        return self.out_proj(out), (key, value)


class Layer(nn.Module):
    """Attention and an MLP, each normalised after its sum."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.attention = Attention(fused)
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.fc2 = nn.Linear(4 * WIDTH, WIDTH)
        self.final_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Kept]:
        """Hidden states, and what a cache would keep."""
        residual = x
        x, kept = self.attention(x, mask)
        x = functional.dropout(x, DROPOUT, self.training)
        x = residual + x
        x = self.attention_norm(x)
        shape = x.shape
        x = x.reshape(-1, x.size(-1))
        residual = x
        x = self.fc1(x)
        x = functional.relu(x)
        x = self.fc2(x)
        x = functional.dropout(x, DROPOUT, self.training)
        x = (residual + x).view(shape)
        x = self.final_norm(x)
        return x, kept


class Decoder(nn.Module):
    """Embeddings narrower than the layers, and the layers."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.embed_tokens = nn.Embedding(VOCABULARY, EMBEDDED, padding_idx=1)
        self.embed_positions = nn.Embedding(POSITIONS, WIDTH)
        self.project_out = nn.Linear(WIDTH, EMBEDDED, bias=False)
        self.project_in = nn.Linear(EMBEDDED, WIDTH, bias=False)
        self.layers = nn.ModuleList(Layer(fused) for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> tuple[Tensor, tuple[Kept, ...]]:
        """Hidden states as narrow as the embeddings, and what a cache would keep."""
        batch, length = tokens.shape
        embedded = self.embed_tokens(tokens)
        present = torch.ones(batch, length, device=tokens.device)
        mask = None
        if not self.fused:
            mask = embedded.new_zeros(batch, 1, length, length)
        places = (torch.cumsum(present.long(), dim=1) * present.long()).long() - 1
        positions = self.embed_positions(places + 2)
        embedded = self.project_in(embedded)
        x = embedded + positions
        caches: tuple[Kept, ...] = ()
        for layer in self.layers:
            outputs = layer(x, mask)
            x = outputs[0]
            caches += (outputs[1],)
        return self.project_out(x), caches


class Opt(nn.Module):
    """From tokens to logits, by the weights of the embedding."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.decoder = Decoder(fused)
        self.head = nn.Linear(EMBEDDED, VOCABULARY, bias=False)
        self.head.weight = self.decoder.embed_tokens.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, tuple[Kept, ...]]:
        """Tokens are of shape (batch, length)."""
        x, caches = self.decoder(tokens)
        return self.head(x).contiguous(), caches


def sum_logits(output: tuple[Tensor, object]) -> Tensor:
    """The benchmark's loss."""
    return output[0].sum()


def predict(case: Case) -> dict[str, int]:
    """The peak of forward and backward; the output of the step before is still held."""
    with torch.device("meta"):
        network = Opt(case.config["attention"] == "sdpa")
    analysis = fxmem.analyze(
        network,
        (fxmem.TensorSpec((case.config["batch"], case.config["tokens"]), "int64"),),
        gpu=case.gpu,
        dtype="float16",
        loss=sum_logits,
        hold_outputs=True,
        alloc_conf="",
    )
    return {"allocated": list_peaks(analysis)["allocated"]}
