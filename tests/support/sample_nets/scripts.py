"""Training scripts, written for a test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

MODEL = """
import copy, math, os, sys
import torch
from torch import nn
from torch.nn import functional as F

def make_model():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(14400, 10)
    )
"""
Write = Callable[..., Path]
