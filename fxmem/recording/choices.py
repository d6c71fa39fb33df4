"""The loss and the optimizer of a step as a caller chooses them: named, written or imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fxmem.loading.parsing import is_target
from fxmem.loading.target import load_function
from fxmem.recording.losses import resolve_loss
from fxmem.recording.optimizers import resolve_optimizer

LossChoice = str | Callable[[Any], torch.Tensor] | None
"""A name, a TARGET, a function from the output to a scalar; None for the default."""
OptimizerChoice = str | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None
"""A name, a TARGET, a callable from the parameters to the optimizer; None for none."""


def check_choices(loss: LossChoice, optimizer: OptimizerChoice) -> None:
    """Checks what is no TARGET, so that a misspelt name is told before anything is imported.

    Raises:
        UsageError: No loss or no optimizer is called that.

    >>> check_choices("mse", "my_package:make_optimizer")
    """
    if not is_target(optimizer):
        resolve_optimizer(optimizer)
    if not is_target(loss):
        resolve_loss(loss)


def load_choice(choice: Any) -> Any:
    """A loss or an optimizer that is given as a TARGET; anything else as it is.

    Raises:
        LoadError: The TARGET cannot be loaded.

    >>> load_choice("adam"), load_choice("torch.nn.functional:mse_loss").__name__
    ('adam', 'mse_loss')
    """
    return load_function(choice) if is_target(choice) else choice


def name_choice(choice: Any) -> str | None:
    """How a loss or an optimizer is called in a report.

    >>> name_choice("adam"), name_choice(torch.optim.SGD), name_choice(nn.MSELoss())
    ('adam', 'SGD', 'MSELoss')
    """
    if choice is None or isinstance(choice, str):
        return choice
    return str(getattr(choice, "__name__", type(choice).__name__))
