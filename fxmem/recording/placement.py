"""Puts fake tensors where the target device has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from fxmem.kernels.target import Target
from fxmem.tracing.devices import lies_on_accelerator


def place_model(model: nn.Module, source: nn.Module, target: Target) -> None:
    """Moves parameters, their gradients and buffers as ``model.to(device)`` does.

    Other tensors of its modules lie where they were made.

    Args:
        model: The fake copy.
        source: What it is a copy of.
        target: Where to.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        _place(tensor, target.device)
        _place(tensor.grad, target.device)
    for copied, given in zip(model.modules(), source.modules(), strict=True):
        for name, value in vars(given).items():
            if isinstance(value, torch.Tensor) and lies_on_accelerator(value):
                _place(vars(copied).get(name), target.device)
    for module in model.modules():
        for kind, move in target.movers.items():
            if isinstance(module, kind):
                move(module)


def place_inputs(inputs: Any, target: Target) -> None:
    """Moves every tensor among a step's inputs, as a training loop does with its batch."""
    for leaf in tree_leaves(inputs):
        _place(leaf, target.device)


def _place(value: Any, device: torch.device) -> None:
    # Where a fake tensor lies is an attribute of it.
    if isinstance(value, FakeTensor):
        value.fake_device = device
