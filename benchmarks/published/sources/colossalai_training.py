"""Convolutional networks of torchvision, forward and backward, ten times over."""

from __future__ import annotations

import os
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import fxmem
from benchmarks.cases import import_torchvision
from benchmarks.published.cases import Case
from benchmarks.published.predicting import list_peaks


def compute_loss(logits: Tensor) -> Tensor:
    """Cross entropy."""
    return F.cross_entropy(
        logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    )


def predict(case: Case) -> dict[str, int]:
    """The peak, never reset; the logits and the loss of a step live until the next has its own."""
    import_torchvision()
    from torchvision import models

    with torch.device("meta"):
        network = models.get_model(case.config["model"])
    with mock.patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":0:0", DISABLE_ADDMM_CUDA_LT="1"):
        analysis = fxmem.analyze(
            network,
            (fxmem.TensorSpec((case.config["batch"], 3, 224, 224), "float32"),),
            gpu=case.gpu,
            loss=compute_loss,
            hold_outputs=True,
            alloc_conf="",
        )
    later = list_peaks(analysis)
    return later | {
        "allocated": max(later["allocated"], list_peaks(analysis, first=True)["allocated"])
    }
