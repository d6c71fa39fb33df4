"""One forward of language models that fills a cache: its peak above what was there before.

Keys and values of a layer are kept as they come, without a copy: where one projection makes
queries, keys and values, all three stay. GPT-NeoX's keys are float32, as its tables of cosines
are, and each layer of Mistral makes its own rotary embeddings. Models with num_logits_to_keep,
Llama's and Mistral's, make logits of the last token alone. Not predicted: forwards that take a
cache (they let its tensors go), models on several GPUs, and those converted to BetterTransformer
(GPT-J, CodeGen).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fxmem
from benchmarks.published.cases import Case
from benchmarks.published.predicting import find_allocated_after, list_peaks
from benchmarks.published.sources.rotary import give_layers_rotary


def list_llama(vocabulary: int, width: int, inner: int, depth: int, heads: int, kv: int) -> Any:
    """The sizes of a Llama or a Mistral."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": 8192,
    }


def list_opt(width: int, depth: int, heads: int) -> Any:
    """The sizes of an OPT."""
    return {
        "hidden_size": width,
        "ffn_dim": 4 * width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "word_embed_proj_dim": width,
    }


def list_neox(vocabulary: int, width: int, heads: int) -> Any:
    """The sizes of a GPT-NeoX."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": 16,
        "num_attention_heads": heads,
        "max_position_embeddings": 4096,
    }


def list_gpt2(width: int, depth: int, heads: int) -> Any:
    """The sizes of a GPT-2."""
    return {"n_embd": width, "n_layer": depth, "n_head": heads}


MISTRAL = list_llama(32000, 4096, 14336, 32, 32, 8) | {"sliding_window": None}
MODELS: dict[str, tuple[str, Any]] = {
    "llama2-7B": ("LlamaForCausalLM", list_llama(32000, 4096, 11008, 32, 32, 32)),
    "llama2-13B": ("LlamaForCausalLM", list_llama(32000, 5120, 13824, 40, 40, 40)),
    "llama3-8B": ("LlamaForCausalLM", list_llama(128256, 4096, 14336, 32, 32, 8)),
    "mistral-7B": ("MistralForCausalLM", MISTRAL),
    "SFR-Embedding-Mistral": ("MistralModel", MISTRAL),
    "opt-125M": ("OPTForCausalLM", list_opt(768, 12, 12)),
    "opt-350M": (
        "OPTForCausalLM",
        list_opt(1024, 24, 16) | {"word_embed_proj_dim": 512, "do_layer_norm_before": False},
    ),
    "opt-1.3B": ("OPTForCausalLM", list_opt(2048, 24, 32)),
    "opt-6.7B": ("OPTForCausalLM", list_opt(4096, 32, 32)),
    "opt-13B": ("OPTForCausalLM", list_opt(5120, 40, 40)),
    "dialo-gpt-small": ("GPT2LMHeadModel", list_gpt2(768, 12, 12)),
    "gpt2-medium": ("GPT2LMHeadModel", list_gpt2(1024, 24, 16)),
    "gpt2-xl": ("GPT2LMHeadModel", list_gpt2(1600, 48, 25)),
    "star-coder": (
        "GPTBigCodeForCausalLM",
        list_gpt2(6144, 40, 48) | {"vocab_size": 49152, "n_inner": 24576, "n_positions": 8192},
    ),
    "stable-lm-3B": ("GPTNeoXForCausalLM", list_neox(50688, 4096, 32)),
    "stable-lm-7B": ("GPTNeoXForCausalLM", list_neox(50432, 6144, 48)),
}


class FirstForward(nn.Module):
    """A model of transformers, and the keys and values that its forward leaves."""

    def __init__(self, name: str, dtype: str) -> None:
        super().__init__()
        import transformers

        architecture, sizes = MODELS[name]
        make = getattr(transformers, architecture)
        config = make.config_class(**sizes, attn_implementation="sdpa")
        self.model = make(config).to(getattr(torch, dtype))
        self.caches = architecture != "MistralModel"
        self.last_only = architecture in ("LlamaForCausalLM", "MistralForCausalLM")
        self.key_dtype = torch.float32 if architecture.startswith("GPTNeoX") else None
        if architecture.startswith("Mistral"):
            give_layers_rotary(self.model.model if self.caches else self.model)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        """Logits or hidden states, and keys and values."""
        from transformers import DynamicCache

        class Cache(DynamicCache):
            """Keeps what it is given."""

            def update(self, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
                kept.extend((key.to(key_dtype or key.dtype), value))
                return key, value

        kept: list[Tensor] = []
        key_dtype = self.key_dtype
        options: dict[str, Any] = {"use_cache": self.caches}
        if self.caches:
            options["past_key_values"] = Cache()
        if self.last_only:
            options["logits_to_keep"] = 1
        output = self.model(input_ids, **options)
        return (output[0], *kept)


def predict(case: Case) -> dict[str, int]:
    """The peak of a forward, less what was allocated before it."""
    analysis = fxmem.analyze(
        f"{__name__}:FirstForward(name={case.config['model']!r}, dtype={case.config['dtype']!r})",
        (fxmem.TensorSpec((1, case.config["length"]), "int64"),),
        mode="infer",
        gpu=case.gpu,
        alloc_conf="",
    )
    before = find_allocated_after(analysis, ())
    return {"allocated by forward": list_peaks(analysis)["allocated"] - before}
