"""State that decides what a call of a model does, compared from call to call."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fxmem.source import find_source
from fxmem.tracing.conditions import read_context

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""Types of values that are compared as such; other objects are by their identity."""


def read_state(module: nn.Module, arguments: Any) -> Any:
    """Reads what decides over a call: its line, arguments, model, gradients and context."""
    leaves, structure = tree_flatten(arguments)
    attributes = [
        (name, value if isinstance(value, PLAIN) else id(value))
        for each in module.modules()
        for name, value in vars(each).items()
    ]
    parameters = [
        (id(each), each.requires_grad, each.untyped_storage()._cdata, id(each.grad))
        for each in module.parameters()
    ]
    buffers = [id(each) for each in module.buffers()]
    given = [*describe_leaves(leaves)]
    return (
        find_source(), id(module), structure, given, attributes, parameters, buffers,
        read_context(),
    )  # fmt: skip


def describe_leaves(leaves: Iterable[Any]) -> Iterable[Any]:
    """Describes tensors by their layout, plain values by themselves and others by identity."""
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            yield leaf if isinstance(leaf, PLAIN) else id(leaf)
            continue
        yield tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad


def read_generators() -> Any:
    """Reads the states of the generators on the host, which a model may draw from."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), torch.default_generator.get_state().numpy().tobytes()
    return states, None if numpy is None else repr(numpy.random.get_state())
