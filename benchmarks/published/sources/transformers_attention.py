"""Encoders of transformers, with attention written out and with fused attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fxmem
from benchmarks.cases import hugging_face
from benchmarks.published.cases import Case
from benchmarks.published.predicting import list_peaks

_BASE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BERT": ("BertForMaskedLM", "BertConfig", {}),
    "ViViT": ("VivitForVideoClassification", "VivitConfig", {"num_labels": 400}),
    "DistilBERT": ("DistilBertForMaskedLM", "DistilBertConfig", {}),
    "ALBERT v2": (
        "AlbertForMaskedLM",
        "AlbertConfig",
        {**_BASE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "ALBERT of the page": (
        "AlbertForMaskedLM",
        "AlbertConfig",
        {
            **_BASE,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
        },
    ),
}


def sum_logits(output: Any) -> Tensor:
    """The benchmark's loss."""
    total: Tensor = output.logits.sum()
    return total


def predict(case: Case) -> dict[str, int]:
    """The peak of forward and backward; the output of the step before is still held."""
    model, config, options = MODELS[case.config["model"]]
    batch, video = case.config["batch"], case.config["model"] == "ViViT"
    inputs = (
        {"pixel_values": fxmem.TensorSpec((batch, 32, 3, 224, 224), "float32")}
        if video
        else {"input_ids": fxmem.TensorSpec((batch, case.config["tokens"]), "int64")}
    )
    build = hugging_face(model, config, attn_implementation=case.config["attention"], **options)
    with torch.device("meta"):
        network = build()
    analysis = fxmem.analyze(
        network,
        (),
        inputs,
        gpu=case.gpu,
        dtype="float32" if video else "float16",
        loss=sum_logits,
        hold_outputs=True,
        alloc_conf="",
    )
    return {"allocated": list_peaks(analysis)["allocated"]}
