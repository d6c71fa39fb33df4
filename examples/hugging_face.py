"""Models of the transformers library, built from a configuration: nothing is downloaded.

fxmem analyze examples/hugging_face.py:gpt2 --input 4x256:int64 --loss cross_entropy
fxmem analyze 'examples/hugging_face.py:llama(layers=4)' --input input_ids=1x128:int64 --mode infer
fxmem analyze examples/hugging_face.py:bert --input input_ids=8x128:int64 --input labels=8x128:int64

Given ``labels``, a model computes its loss itself, and ``--loss`` is not needed.
"""

from __future__ import annotations

from torch import nn


def gpt2(layers: int = 12, width: int = 768, heads: int = 12) -> nn.Module:
    """GPT-2 with a head for the next token; by default the small one."""
    from transformers import GPT2Config, GPT2LMHeadModel  # pip install transformers

    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=width, n_head=heads))


def llama(layers: int = 16, width: int = 2048, heads: int = 32) -> nn.Module:
    """Llama; by default of the size of Llama 3.2 1B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128_256,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 4),
            tie_word_embeddings=True,
        )
    )


def bert(layers: int = 12, width: int = 768, heads: int = 12) -> nn.Module:
    """BERT with a head for masked tokens; by default the base one."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            intermediate_size=4 * width,
        )
    )
