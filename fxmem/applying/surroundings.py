"""Contexts around a call: autocast, function transforms, compilers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.utils._pytree import tree_leaves

from fxmem.tracing.conditions import read_autocast_on

MISCOMPILED = (
    "PyTorch compiles spectral normalisation to other values where segments break the graph: this"
    " model is compiled without the plan"
)


def is_transforming() -> bool:
    """Whether a transform of ``torch.func`` runs: what it wraps has no storage to be traced from,
    and is gone when backward comes.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def find_autocast(inputs: Any) -> torch.dtype | None:
    """What a call is autocast to where its tensors are; None for nothing.

    Args:
        inputs: Of the call, in whatever structure.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     find_autocast([torch.ones(1)])
    torch.bfloat16
    """
    return read_autocast_on(find_device(inputs))


def find_device(inputs: Any) -> str:
    """Where the tensors of a call are: ``"cuda"`` or ``"cpu"``."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    return "cuda" if any(tensor.is_cuda for tensor in tensors) else "cpu"


def is_normalised(modules: Iterable[nn.Module]) -> bool:
    """Tells whether a weight's norm is computed with ``out=``, into a buffer.

    Where a compiled part of a model overwrites what it was given, PyTorch 2.13 then returns the
    buffer in the place of a result.
    """
    return any(isinstance(module, _SpectralNorm) for module in modules)
