"""The cases of the CUDA accuracy benchmark: models, precisions, optimizers and batch sizes.

Sizes are those of real use, unlike in ``benchmarks.models``, whose steps run on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from benchmarks import own_models as own
from benchmarks.cases import Case, hugging_face, ids, image, timm_model, vision

Precision = Literal["fp32", "bf16", "fp16"]
"""Without autocast, under bf16 autocast, under fp16 autocast with a gradient scaler."""

Compiled = Literal["", "model", "blocks", "budget 0.2", "budget 0.5", "mode reduce-overhead"]
"""How ``torch.compile`` is used: the whole model, also under an activation memory budget or in a
mode, or the blocks in :data:`BLOCKS`."""

BLOCKS = {"gpt2": ("transformer.h",), "llama": ("model.layers",), "vit_b_16": ("encoder.layers",)}
"""The modules whose children are compiled one by one, by the name of the model."""

GPT2: dict[str, Any] = {"n_layer": 12, "n_embd": 768, "n_head": 12}
BERT: dict[str, Any] = {"num_hidden_layers": 12}
LLAMA: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}


@dataclass(frozen=True)
class CudaCase:
    """A model and how it is run.

    Attributes:
        name: Names model, batch, precision and optimizer.
        build: From the batch size to the case.
        batch: The batch size.
        precision: See :data:`Precision`.
        optimizer: ``sgd``, ``adam`` (foreach, as is torch's default), ``adam-fused``, or None
            for inference.
        traced: Whether every event of the allocator is written down.
        compiled: See :data:`Compiled`; empty for an eager step.
    """

    build: Callable[[int], Case]
    batch: int
    precision: Precision = "fp32"
    optimizer: str | None = "adam"
    traced: bool = False
    compiled: Compiled = ""

    @property
    def name(self) -> str:
        """Unique among :data:`CUDA_CASES`."""
        parts = (self.build(self.batch).name, f"b{self.batch}", self.precision)
        compiled = [f"compiled {self.compiled}".replace(" ", "_")] if self.compiled else []
        return "-".join((*parts, self.optimizer or "infer", *compiled))

    @property
    def activation_memory_budget(self) -> float | None:
        """What inductor is told, where it is."""
        kind, _, argument = self.compiled.partition(" ")
        return float(argument) if kind == "budget" else None

    def compile_model(self, model: nn.Module) -> None:
        """Compiles the model as the case has it."""
        kind, _, argument = self.compiled.partition(" ")
        if kind == "blocks":
            for name in BLOCKS[self.build(self.batch).name]:
                for block in model.get_submodule(name).children():
                    block.compile()
        elif kind:
            model.compile(mode=argument if kind == "mode" else None)


def _vision(name: str, size: int = 224, **kwargs: Any) -> Callable[[int], Case]:
    return lambda batch: Case(name, vision(name, **kwargs), (image(batch, 3, size, size),))


def _timm(name: str, size: int = 224) -> Callable[[int], Case]:
    return lambda batch: Case(name, timm_model(name), (image(batch, 3, size, size),))


def _gpt2(batch: int) -> Case:
    kwargs = {"input_ids": ids(batch, 512), "labels": ids(batch, 512)}
    return Case("gpt2", hugging_face("GPT2LMHeadModel", "GPT2Config", **GPT2), kwargs=kwargs)


def _bert(batch: int) -> Case:
    kwargs = {"input_ids": ids(batch, 256), "labels": ids(batch, 256)}
    return Case("bert", hugging_face("BertForMaskedLM", "BertConfig", **BERT), kwargs=kwargs)


def _llama(batch: int) -> Case:
    kwargs = {"input_ids": ids(batch, 512), "labels": ids(batch, 512)}
    return Case("llama", hugging_face("LlamaForCausalLM", "LlamaConfig", **LLAMA), kwargs=kwargs)


def _t5(batch: int) -> Case:
    kwargs = {"input_ids": ids(batch, 256), "labels": ids(batch, 128)}
    config = {"decoder_start_token_id": 0}
    return Case("t5", hugging_face("T5ForConditionalGeneration", "T5Config", **config), (), kwargs)


def _lstm(batch: int) -> Case:
    def build() -> nn.Module:
        return own.Recurrent(nn.LSTM, num_layers=2, dropout=0.1)

    return Case("lstm", build, (ids(batch, 200, high=200),))


def _gru(batch: int) -> Case:
    return Case(
        "gru_bidirectional",
        lambda: own.Recurrent(nn.GRU, bidirectional=True),
        (ids(batch, 200, high=200),),
    )


def _own(name: str, model: Callable[[], nn.Module], *shape: int) -> Callable[[int], Case]:
    return lambda batch: Case(name, model, (image(batch, *shape),))


def _flex(batch: int) -> Case:
    return Case("flex_attention", own.FlexDecoder, (ids(batch, 1024, high=8192),))


_RESNET50, _VIT = _vision("resnet50"), _vision("vit_b_16")
_UNET = _own("unet", own.UNet, 3, 256, 256)
_ENCODER = _own("transformer_encoder", own.Encoder, 80, 64)

MODELS: tuple[tuple[Callable[[int], Case], int], ...] = (
    (_RESNET50, 32),
    (_vision("resnet18"), 64),
    (_vision("densenet121"), 16),
    (_vision("mobilenet_v3_large"), 64),
    (_vision("efficientnet_b0"), 32),
    (_vision("convnext_tiny"), 32),
    (_vision("swin_t"), 32),
    (_VIT, 32),
    (_vision("vgg16_bn"), 16),
    (_vision("deeplabv3_resnet50", weights_backbone=None), 4),
    (_timm("regnety_016"), 32),
    (_timm("mixer_b16_224"), 32),
    (_timm("deit_small_patch16_224"), 32),
    (_gpt2, 8),
    (_bert, 16),
    (_llama, 2),
    (_t5, 8),
    (_lstm, 64),
    (_gru, 64),
    (_UNET, 8),
    (_ENCODER, 64),
)
"""Each with the batch at which it is measured in every precision."""

TRACED = (_RESNET50, _VIT, _UNET, _gpt2, _bert, _llama, _t5, _lstm, _gru, _ENCODER)


def list_cases() -> tuple[CudaCase, ...]:
    """Every model in every precision; optimizers and batch sizes on some."""
    cases = []
    for build, batch in MODELS:
        traced = build in TRACED
        cases += [
            CudaCase(build, batch, "fp32", "adam", traced),
            CudaCase(build, batch, "bf16", "adam", traced),
            CudaCase(build, batch, "fp16", "adam", traced=build in (_RESNET50, _gpt2)),
            CudaCase(build, batch, "fp32", None),
        ]
    for build, batch in ((_RESNET50, 32), (_VIT, 32), (_gpt2, 8), (_lstm, 64)):
        cases += [
            CudaCase(build, batch, "fp32", "sgd"),
            CudaCase(build, batch, "fp32", "adam-fused", traced=build is _RESNET50),
            CudaCase(build, batch * 2, "bf16", "adam"),
            CudaCase(build, max(1, batch // 4), "bf16", "adam"),
        ]
    return (*cases, *_list_compiled_cases())


def _list_compiled_cases() -> Iterator[CudaCase]:
    for build, batch in MODELS:
        if build not in (_lstm, _gru):  # Dynamo leaves cuDNN's recurrent layers alone
            yield CudaCase(build, batch, "bf16", "adam-fused", compiled="model")
    for build, batch in ((_gpt2, 8), (_llama, 2), (_VIT, 32)):
        traced = build is _gpt2
        yield CudaCase(build, batch, "fp32", "adam", traced, compiled="model")
        yield CudaCase(build, batch, "bf16", "adam", traced, compiled="blocks")
        yield CudaCase(build, batch, "bf16", "adam", compiled="budget 0.5")
        yield CudaCase(build, batch, "bf16", "adam", compiled="budget 0.2")
        yield CudaCase(build, batch, "bf16", None, compiled="model")
    yield CudaCase(_RESNET50, 32, "fp32", "sgd", traced=True, compiled="model")
    yield CudaCase(_gpt2, 8, "bf16", "adam", compiled="mode reduce-overhead")
    yield CudaCase(_flex, 8, "bf16", "adam", traced=True, compiled="model")


CUDA_CASES = list_cases()
