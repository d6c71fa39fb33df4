"""Hooks of modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

CALLED_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The tables that a module has its hooks in."""
HOOK_TABLES = (
    *CALLED_HOOKS,
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""Those, and the tables of what each hook takes."""
GLOBAL_HOOKS: tuple[dict[int, Callable[..., Any]], ...] = tuple(
    getattr(torch.nn.modules.module, f"_global{name}") for name in CALLED_HOOKS
)
"""The tables of hooks that are called for all modules."""

_RESULT_HOOKS = tuple(key for key in CALLED_HOOKS if key != "_forward_pre_hooks")


def sees_arguments(module: nn.Module) -> bool:
    """Tells whether hooks of a module may keep what it is given."""
    return any(getattr(module, key) for key in CALLED_HOOKS)


def sees_result(module: nn.Module) -> bool:
    """Tells whether hooks of a module may keep what it makes.

    One that runs before ``forward``, as those that normalise weights do, does not see it, unless
    the module returns what it is given: ``Identity`` does, and nothing that computes with weights.
    """
    return any(getattr(module, key) for key in _RESULT_HOOKS) or (
        bool(module._forward_pre_hooks) and not module._parameters
    )
