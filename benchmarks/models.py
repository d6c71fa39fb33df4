"""The zoo of the accuracy benchmark: models whose real CPU step takes a few seconds at most."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks import own_models as own
from benchmarks.cases import Case, Spec, hugging_face, ids, image, timm_model, vision

GPT2: dict[str, Any] = {"n_layer": 3, "n_embd": 96, "n_head": 4, "vocab_size": 500}
LLAMA: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
}
BERT: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 500,
}
T5: dict[str, Any] = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 400,
    "decoder_start_token_id": 0,
}
WHISPER: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 400,
    "max_source_positions": 64,
    "num_mel_bins": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
VIT: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 8,
    "num_labels": 10,
}

TORCHVISION = [
    Case("resnet18", vision("resnet18"), (image(8, 3, 128, 128),)),
    Case("resnet50", vision("resnet50"), (image(4, 3, 128, 128),)),
    Case("densenet121", vision("densenet121"), (image(2, 3, 128, 128),)),
    Case("vgg11_bn", vision("vgg11_bn"), (image(2, 3, 96, 96),)),
    Case("mobilenet_v3_small", vision("mobilenet_v3_small"), (image(8, 3, 128, 128),)),
    Case("efficientnet_b0", vision("efficientnet_b0"), (image(4, 3, 128, 128),)),
    Case("convnext_tiny", vision("convnext_tiny"), (image(4, 3, 128, 128),)),
    Case("regnet_y_400mf", vision("regnet_y_400mf"), (image(4, 3, 128, 128),)),
    Case("swin_t", vision("swin_t"), (image(2, 3, 128, 128),)),
    Case("vit_b_16", vision("vit_b_16"), (image(2, 3, 224, 224),)),
    Case("shufflenet_v2", vision("shufflenet_v2_x1_0"), (image(8, 3, 128, 128),)),
    Case("googlenet", vision("googlenet", init_weights=False), (image(4, 3, 128, 128),)),
    Case("squeezenet", vision("squeezenet1_1"), (image(8, 3, 128, 128),)),
    Case(
        "deeplabv3_resnet50",
        vision("deeplabv3_resnet50", weights_backbone=None),
        (image(2, 3, 96, 96),),
    ),
    Case("r3d_18", vision("r3d_18"), (image(1, 3, 8, 64, 64),)),
    Case(
        "raft_small",
        vision("raft_small"),
        (image(1, 3, 128, 128), image(1, 3, 128, 128)),
        {"num_flow_updates": 3},
    ),
]

TIMM = [
    Case("timm_coat", timm_model("coat_tiny"), (image(1, 3, 224, 224),)),
    Case("timm_xcit", timm_model("xcit_nano_12_p16_224"), (image(2, 3, 224, 224),)),
    Case("timm_regnety", timm_model("regnety_002"), (image(4, 3, 128, 128),)),
    Case("timm_mixer", timm_model("mixer_s32_224"), (image(4, 3, 224, 224),)),
    Case("timm_efficientformer", timm_model("efficientformer_l1"), (image(2, 3, 224, 224),)),
    Case("timm_mobilevit", timm_model("mobilevit_xxs"), (image(2, 3, 256, 256),)),
    Case("timm_crossvit", timm_model("crossvit_tiny_240"), (image(1, 3, 240, 240),)),
    Case("timm_resnest", timm_model("resnest14d"), (image(2, 3, 128, 128),)),
]

HUGGING_FACE = [
    Case(
        "hf_gpt2_labels",
        hugging_face("GPT2LMHeadModel", "GPT2Config", **GPT2),
        kwargs={"input_ids": ids(4, 128), "labels": ids(4, 128)},
    ),
    Case("hf_gpt2", hugging_face("GPT2LMHeadModel", "GPT2Config", **GPT2), (ids(4, 128),)),
    Case(
        "hf_gpt2_eager",
        hugging_face("GPT2Model", "GPT2Config", attn_implementation="eager", **GPT2),
        (ids(4, 64),),
        {"use_cache": False},
    ),
    Case(
        "hf_bert_labels",
        hugging_face("BertForMaskedLM", "BertConfig", **BERT),
        kwargs={
            "input_ids": ids(4, 64),
            "attention_mask": Spec((4, 64), torch.int64, 2),
            "labels": ids(4, 64),
        },
    ),
    Case("hf_bert", hugging_face("BertModel", "BertConfig", **BERT), (ids(4, 64),)),
    Case(
        "hf_llama_labels",
        hugging_face("LlamaForCausalLM", "LlamaConfig", **LLAMA),
        kwargs={"input_ids": ids(2, 128), "labels": ids(2, 128)},
    ),
    Case("hf_llama", hugging_face("LlamaForCausalLM", "LlamaConfig", **LLAMA), (ids(2, 128),)),
    Case(
        "hf_t5_labels",
        hugging_face("T5ForConditionalGeneration", "T5Config", **T5),
        kwargs={"input_ids": ids(2, 64), "labels": ids(2, 32)},
    ),
    Case(
        "hf_t5",
        hugging_face("T5ForConditionalGeneration", "T5Config", **T5),
        kwargs={"input_ids": ids(2, 64), "decoder_input_ids": ids(2, 32)},
    ),
    Case(
        "hf_vit_labels",
        hugging_face("ViTForImageClassification", "ViTConfig", **VIT),
        kwargs={"pixel_values": image(4, 3, 64, 64), "labels": ids(4, high=10)},
    ),
    Case(
        "hf_whisper_labels",
        hugging_face("WhisperForConditionalGeneration", "WhisperConfig", **WHISPER),
        kwargs={"input_features": image(2, 16, 128), "labels": ids(2, 24)},
    ),
    Case(
        "hf_whisper",
        hugging_face("WhisperForConditionalGeneration", "WhisperConfig", **WHISPER),
        kwargs={"input_features": image(2, 16, 128), "decoder_input_ids": ids(2, 24)},
    ),
]

OWN = [
    Case("unet", own.UNet, (image(2, 3, 96, 96),)),
    Case(
        "lstm",
        lambda: own.Recurrent(nn.LSTM, num_layers=2, dropout=0.1),
        (ids(8, 40, high=200),),
    ),
    Case(
        "gru_bidirectional",
        lambda: own.Recurrent(nn.GRU, bidirectional=True),
        (ids(8, 40, high=200),),
    ),
    Case("hand_rolled_rnn", own.HandRolledRNN, (image(8, 20, 32),)),
    Case("transformer_encoder", own.Encoder, (image(4, 80, 64),)),
    Case("transformer_pre_norm", lambda: own.Encoder(norm_first=True), (image(4, 80, 64),)),
    Case("inplace", own.InPlace, (image(128, 64),)),
    Case("tied_weights", own.TiedWeights, (ids(4, 32, high=500),)),
    Case("reused_module", own.Reused, (image(64, 96),)),
    Case("dict_output", own.DictOutput, (image(64, 64),), {"scale": 0.5}),
    Case("dataclass_output", own.DataclassOutput, (image(64, 64),)),
    Case("dataclass_loss", own.DataclassOutput, (image(64, 64), image(64, 32))),
    Case(
        "checkpoint_reentrant",
        lambda: own.Checkpointed(use_reentrant=True),
        (image(128, 64, requires_grad=True),),
    ),
    Case(
        "checkpoint_non_reentrant",
        lambda: own.Checkpointed(use_reentrant=False),
        (image(128, 64),),
    ),
    Case("custom_function", own.CustomFunction, (image(64, 128),)),
    Case("frozen_resnet18", own.frozen_resnet18, (image(4, 3, 96, 96),)),
    Case("input_grad_resnet18", vision("resnet18"), (image(2, 3, 96, 96, requires_grad=True),)),
    Case("views", own.Views, (image(4, 32, 64),)),
    Case("norms", own.Norms, (image(4, 8, 32, 32),)),
    Case("embedding_bag", own.Bag, (ids(16, 12, high=300),)),
    Case("low_precision", own.LowPrecision, (image(64, 128),)),
    Case("mixture_of_experts", own.MixtureOfExperts, (image(4, 32, 64),)),
]

CASES: tuple[Case, ...] = (*TORCHVISION, *TIMM, *HUGGING_FACE, *OWN)


def find(name: str) -> Case:
    """Returns the case called `name`.

    Raises:
        KeyError: There is no such case.
    """
    return {case.name: case for case in CASES}[name]
