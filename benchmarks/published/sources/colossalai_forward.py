"""Forwards of torchvision's residual networks and ConvNeXts in training mode, in float32."""

from __future__ import annotations

import os
from unittest import mock

import torch

import fxmem
from benchmarks.cases import import_torchvision
from benchmarks.published.cases import Case
from benchmarks.published.predicting import find_allocated_after
from fxmem.graph import Phase


def predict(case: Case) -> dict[str, int]:
    """Predicts the bytes after forward: the model, its input and output, activations."""
    import_torchvision()
    from torchvision import models

    with torch.device("meta"):
        network = models.get_model(case.config["model"])
    with mock.patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":0:0", DISABLE_ADDMM_CUDA_LT="1"):
        analysis = fxmem.analyze(
            network,
            (fxmem.TensorSpec((case.config["batch"], 3, 224, 224), "float32"),),
            gpu=case.gpu,
            alloc_conf="",
        )
    image_bytes = case.config["batch"] * 3 * 224 * 224 * 4
    return {
        "allocated by model": find_allocated_after(analysis, ()) - image_bytes,
        "allocated after forward": find_allocated_after(analysis, (Phase.FORWARD,)),
    }
