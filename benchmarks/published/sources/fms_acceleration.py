"""Fine-tuning of Mistral, PowerLM and SantaCoder by Hugging Face's Trainer, with and without LoRA.

Gradient checkpointing, packed sequences, AdamW (foreach). The Trainer drops a step's output with
its logits before backward and gives the gradients back after the step, so that all figures are of
a loss alone. Between versions of transformers the losses differ in what they hold, and up to 4.45
each layer of Mistral had rotary embeddings of its own.

With 4-bit weights (bitsandbytes, ``accelerated-peft-bnb``) the layers are packed where the model is
made on the GPU, NF4 with double quantization, and adapters follow. Without the plugin
(``baseline-peft-bnb``) TRL casts norms to float32, and with them what the layers return. GPTQ's
weights (``accelerated-peft-autogptq``) are packed in the checkpoint, and the plugin's layer
dequantizes them for each product (``gptqmodel/nn_modules/qlinear/qlinear_tritonv2.py``).

Not predicted: rows of two GPUs (FSDP) and of Triton kernels (``foak``, padding-free, ScatterMoE) of
the same tables.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

import fxmem
from benchmarks.published.cases import Case
from benchmarks.published.predicting import find_allocated_after, list_peaks
from benchmarks.published.sources.low_rank import add_adapters
from benchmarks.published.sources.rotary import Rotary, give_layers_rotary

CONFIGS: dict[str, dict[str, Any]] = {
    "mistral": {
        "vocab_size": 32001,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "sliding_window": None,
    },
    "llama-70b": {  # as Mistral's model, which computes the same
        "vocab_size": 32001,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "sliding_window": None,
    },
    "granite": {
        "vocab_size": 49152,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 40,
        "num_attention_heads": 36,
        "num_key_value_heads": 36,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 9.0,
    },
    "santacoder": {
        "vocab_size": 49280,
        "n_embd": 2048,
        "n_inner": 8192,
        "n_layer": 24,
        "n_head": 16,
        "n_positions": 2048,
        "multi_query": True,
        "bos_token_id": 49152,
        "eos_token_id": 49152,
    },
}
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")


class Keeping(nn.Module):
    """A linear layer of keys and values whose results stay, as in a cache, until they are dropped.

    GPTBigCode up to 4.48 fills its cache also under gradient checkpointing; the computation that
    backward does again fills none.
    """

    def __init__(self, linear: nn.Module, kept: list[Tensor]) -> None:
        super().__init__()
        self.linear = linear
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        """As the linear layer's."""
        result: Tensor = self.linear(x)
        if not torch.is_grad_enabled():
            self.kept.append(result)
        return result


class FineTuning(nn.Module):
    """A causal model and its loss, as of a version of transformers."""

    def __init__(
        self, name: str, transformers: str, dtype: str, rank: int, dropout: float, amp: bool
    ) -> None:
        super().__init__()
        from transformers import (
            GPTBigCodeConfig,
            GPTBigCodeForCausalLM,
            GraniteConfig,
            GraniteForCausalLM,
            MistralConfig,
            MistralForCausalLM,
        )

        classes: dict[str, tuple[Any, Any]] = {
            "mistral": (MistralConfig, MistralForCausalLM),
            "llama-70b": (MistralConfig, MistralForCausalLM),
            "granite": (GraniteConfig, GraniteForCausalLM),
            "santacoder": (GPTBigCodeConfig, GPTBigCodeForCausalLM),
        }
        make_config, make_model = classes[name]
        config = make_config(**CONFIGS[name], use_cache=False, attn_implementation="sdpa")
        self.model = make_model(config).to(getattr(torch, dtype))
        if name == "mistral" and transformers < "4.46":
            give_layers_rotary(self.model.model)
        elif name != "santacoder":
            self.model.model.rotary_emb = Rotary(config.hidden_size // config.num_attention_heads)
        self.kept: list[Tensor] = []
        if name == "santacoder":
            for block in self.model.transformer.h:
                block.attn.c_attn = Keeping(block.attn.c_attn, self.kept)
        if rank:
            self.add_adapters(rank, dropout)
        self.model.activation_checkpointing_enable({"use_reentrant": True})
        self.upcasts = name != "santacoder"
        self.keeps_logits = transformers > "4.46"
        self.amp = amp

    def add_adapters(self, rank: int, dropout: float) -> None:
        """Gives the attention's layers adapters."""
        add_adapters(self.model, ADAPTED, rank, dropout)
        self.model.enable_input_require_grads()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """The loss, of tokens of shape (batch, length); nothing is masked."""
        backbone = self.model.get_decoder()
        hidden = backbone(input_ids)[0]
        logits = self.model.lm_head(hidden)
        if hasattr(self.model.config, "logits_scaling"):
            logits = logits / self.model.config.logits_scaling
        output = logits
        if self.upcasts:
            logits = logits.float()
        if not self.keeps_logits:
            output = logits
        loss = self.find_loss(logits, labels)
        if self.amp:
            output.float()  # accelerate converts outputs to float32
        self.kept.clear()
        return loss

    def find_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of each token's successor."""
        shifted = logits[..., :-1, :].contiguous()
        wanted = labels[..., 1:].contiguous()
        return F.cross_entropy(shifted.view(-1, shifted.shape[-1]), wanted.view(-1))


def take_loss(output: Tensor) -> Tensor:
    """The output, which is the loss."""
    return output


def pack(model: nn.Module) -> None:
    """Packs the linear layers to 4 bits, as ``from_pretrained`` does."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    options = {"quant_type": "nf4", "compress_statistics": True}
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                sizes = child.in_features, child.out_features, child.bias is not None
                packed = Linear4bit(*sizes, torch.bfloat16, **options, device="meta")
                weight = Params4bit(child.weight.data, module=packed, **options)
                packed.weight = weight.to("cuda")
                setattr(module, name, packed)


class Dequantized(torch.autograd.Function):
    """A product with a weight that is made for it, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, *rest: Tensor) -> Tensor:
        ctx.save_for_backward(packed, *rest)
        return x @ packed.new_empty((packed.shape[0] * 8, packed.shape[1]), dtype=torch.float16)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        packed, *rest = ctx.saved_tensors
        sizes = packed.shape[0] * 8, packed.shape[1]
        weight = packed.new_empty(sizes, dtype=torch.float16)
        return gradients[0] @ weight.t(), None, *(None for _ in rest)


class GptqLinear(nn.Linear):
    """A linear layer of 4 bits, with a scale for each group of inputs; 0 for one of all."""

    def __init__(self, inputs: int, outputs: int, group: int) -> None:
        super().__init__(inputs, outputs, bias=False, device="meta")
        del self.weight
        groups = inputs // (group or inputs)
        for name, sizes, dtype in (
            ("qweight", (inputs // 8, outputs), torch.int32),
            ("scales", (groups, outputs), torch.float16),
            ("qzeros", (groups, outputs // 8), torch.int32),
            ("g_idx", (inputs,), torch.int32),
        ):
            self.register_buffer(name, torch.zeros(sizes, dtype=dtype, device="cuda"))

    def forward(self, input: Tensor) -> Tensor:
        """As the linear layer's, in float16."""
        rows = input.reshape(-1, self.in_features)
        output: Tensor = Dequantized.apply(rows, self.qweight, self.scales, self.qzeros, self.g_idx)
        return output.half().reshape(*input.shape[:-1], self.out_features)


def pack_gptq(model: nn.Module, group: int) -> None:
    """Gives a model the layers of a checkpoint that GPTQ has packed."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, GptqLinear(child.in_features, child.out_features, group))


def predict_packed(case: Case) -> dict[str, int]:
    """The same with 4-bit weights."""
    config, lora = case.config, case.config["lora"]
    is_gptq = "group" in config
    dtype = torch.float16 if is_gptq else torch.bfloat16
    with fxmem.record(gpu=case.gpu, steps=2, alloc_conf="") as recording:
        with torch.device("cuda"):
            options = config["transformers"], config["dtype"], 0, 0.0, True
            model = FineTuning(config["model"], *options).requires_grad_(False)
            if is_gptq:
                pack_gptq(model.model.get_decoder(), config["group"])
            else:
                pack(model.model.get_decoder())
            for module in model.modules():
                if config.get("norms") and type(module).__name__.endswith("RMSNorm"):
                    module.to(getattr(torch, config["norms"]))
            model.add_adapters(lora["rank"], lora["dropout"])
            sizes = config["batch"], config["length"]
            tokens = [torch.zeros(sizes, dtype=torch.int64) for _ in range(3)]
        model.train()
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = AdamW(trained)
        total = torch.zeros((), device="cuda")
        scaler = torch.amp.GradScaler("cuda", enabled=is_gptq)
        for _ in range(3):
            with torch.autocast("cuda", dtype):
                loss = model(*tokens)
            scaler.scale(loss).backward()
            step_loss = loss.detach()
            del loss
            total += step_loss  # which the Trainer holds, both, and the norm
            scaler.unscale_(optimizer)
            _norm = nn.utils.clip_grad_norm_(trained, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after = torch.cuda.memory_allocated()
    return {
        "allocated": recording.steps[-1].peak_bytes,
        "allocated after training": after,
    }


def predict(case: Case) -> dict[str, int]:
    """The peak of training, and what is allocated when it is over."""
    config = case.config
    if config.get("bits") == 4:
        return predict_packed(case)
    lora = config.get("lora", {"rank": 0, "dropout": 0.0})
    tokens = fxmem.TensorSpec((config["batch"], config["length"]), "int64")
    amp = config.get("autocast")
    target = (
        f"{__name__}:FineTuning(name={config['model']!r}, transformers={config['transformers']!r}, "
        f"dtype={config['dtype']!r}, rank={lora['rank']}, dropout={lora['dropout']}, "
        f"amp={amp is not None})"
    )
    analysis = fxmem.analyze(
        target,
        (tokens, tokens, tokens),
        gpu=case.gpu,
        autocast=amp,
        optimizer=AdamW,
        loop="huggingface",
        loss=take_loss,
        alloc_conf="",
    )
    return {
        "allocated": list_peaks(analysis)["allocated"],
        "allocated after training": find_allocated_after(analysis, ()),
    }
