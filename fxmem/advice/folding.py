"""Batch normalisations folded into the convolutions before them, for inference."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fxmem.fakes.devices import keep_default_on_cpu, translate_devices
from fxmem.fakes.fake_mode import make_fake_mode
from fxmem.loading.building import silence_fake_kernels
from fxmem.loading.target import load_target, prepare_targets

_FOLDED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
}
"""Convolutions, by their own class alone, with the batch normalisation that follows them."""


@contextlib.contextmanager
def fold_norms(model: nn.Module | str, fx_graph: Any) -> Iterator[tuple[nn.Module | str, int]]:
    """Yields the model without batch normalisations after convolutions, and their number.

    At the end the model is as it was. Its inference has the ``torch.fx.Graph``.
    """
    calls = Counter(node.target for node in fx_graph.nodes if node.op == "call_module")
    pairs = [  # a call of one module right after another, of which nothing else is made
        (conv, norm)
        for norm in fx_graph.nodes
        if norm.op == "call_module" and len(norm.all_input_nodes) == 1
        for conv in norm.all_input_nodes
        if conv.op == "call_module" and len(conv.users) == 1
        if calls[conv.target] == calls[norm.target] == 1
    ]
    if pairs and isinstance(model, str):
        with (
            torch.inference_mode(False),
            prepare_targets(model),
            silence_fake_kernels(),
            keep_default_on_cpu(),
            translate_devices(),
        ):
            model = load_target(model, make_fake_mode())
    before: list[tuple[nn.Module, str, Any]] = []
    try:
        count = 0
        for conv, norm in pairs:
            assert isinstance(model, nn.Module)
            count += _fold(model, conv.target, norm.target, before)
        yield model, count
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


def _fold(
    model: nn.Module, conv_name: str, norm_name: str, before: list[tuple[nn.Module, str, Any]]
) -> bool:
    """Folds a pair as far as memory goes: weights keep their shape, and there is a bias.

    Source: ``torch/nn/utils/fusion.py``, ``fuse_conv_bn_weights``.
    """
    conv, norm = model.get_submodule(conv_name), model.get_submodule(norm_name)
    if type(norm) is not _FOLDED.get(type(conv)) or norm.running_mean is None:
        return False
    if conv.bias is None:
        before.append((conv, "bias", None))
        conv.bias = nn.Parameter(conv.weight.new_empty(conv.weight.shape[0]))
    parent_name, _, name = norm_name.rpartition(".")
    parent = model.get_submodule(parent_name)
    before.append((parent, name, norm))
    setattr(parent, name, nn.Identity())
    return True
