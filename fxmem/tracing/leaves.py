"""Which modules are one node of a graph, and which are entered."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrize

_CONTAINERS = (
    nn.Sequential,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
"""torch.nn's own modules that only call others. torch.fx makes a leaf of all but the first, and
then a whole encoder is one node; see docs/decisions."""


def is_leaf(module: nn.Module) -> bool:
    """Tells whether a module is one node, as ``torch.fx.Tracer.is_leaf_module`` decides."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    is_own = find_class(module).__module__.startswith(("torch.nn", "torch.ao.nn"))
    return is_own and not isinstance(module, _CONTAINERS)


def find_class(module: nn.Module) -> type[nn.Module]:
    """The class whose code a module runs: a parametrization puts one of its own before that."""
    kind = type(module)
    if kind.__module__ == parametrize.__name__ and parametrize.is_parametrized(module):
        return kind.__mro__[1]
    return kind
