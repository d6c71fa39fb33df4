"""Three linear layers without bias, line by line."""

from __future__ import annotations

import os
from unittest import mock

from torch import nn

import fxmem
from benchmarks.published.cases import Case
from benchmarks.published.predicting import find_allocated_after
from fxmem.graph import Phase

WIDTH = 1024


def build() -> nn.Sequential:
    """The layers."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH, bias=False),
        nn.Linear(WIDTH, WIDTH, bias=False),
        nn.Linear(WIDTH, 1, bias=False),
    )


def predict(case: Case) -> dict[str, int]:
    """Predicts the bytes at moments of a step; later steps begin with output and gradients."""
    later = case.config["later"]
    with mock.patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":0:0"):
        analysis = fxmem.analyze(
            f"{__name__}:build",
            (fxmem.TensorSpec((WIDTH, WIDTH), "float32"),),
            gpu=case.gpu,
            set_to_none=not later,
            hold_outputs=later,
            alloc_conf="",
        )
    return {
        "allocated before": find_allocated_after(analysis, ()),
        "allocated after forward": find_allocated_after(analysis, (Phase.FORWARD, Phase.LOSS)),
        "allocated after backward": find_allocated_after(analysis),
    }
