"""The price of the checkpoints that a library's own switch turns on, beside that of plans."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from fxmem.analysis import Analysis
from fxmem.analyzing import analyze_again
from fxmem.errors import FxmemError
from fxmem.planning.plan import CheckpointPrice
from fxmem.planning.prepared_step import check_analysis, price_change

_SWITCHES = (
    ("gradient_checkpointing_enable", "gradient_checkpointing_disable"),  # transformers
    ("enable_gradient_checkpointing", "disable_gradient_checkpointing"),  # diffusers
    ("set_grad_checkpointing", "set_grad_checkpointing"),  # timm, which takes True or False
)


def price_checkpoints(analysis: Analysis) -> CheckpointPrice | None:
    """Analyses a step again with the checkpoints that the model has a switch for.

    The switches are ``gradient_checkpointing_enable()`` of transformers,
    ``enable_gradient_checkpointing()`` of diffusers and ``set_grad_checkpointing()`` of timm.

    Args:
        analysis: Of a training step, made in this process.

    Returns:
        The price; None if the model has no such switch, or cannot be analysed with it.
    """
    check_analysis(analysis)
    model = getattr(analysis.blueprint, "model", None)
    found = next(((on, off) for on, off in _SWITCHES if hasattr(model, on)), None)
    if model is None or found is None or analysis.setup.mode != "train":
        return None
    options = replace(analysis.blueprint.options, frontend="record")  # no graph holds checkpoints
    recorded = replace(analysis, blueprint=replace(analysis.blueprint, options=options))
    try:
        with _turn_on(model, *found):
            other = analyze_again(recorded)
    except (FxmemError, ValueError):  # some of transformers' models refuse the switch
        return None
    return CheckpointPrice(f"{found[0]}()", other.peak_bytes, *price_change(analysis, other))


@contextlib.contextmanager
def _turn_on(model: nn.Module, on: str, off: str) -> Iterator[None]:
    switched: Any = model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers 5 has other names for the same
        getattr(switched, on)()
        try:
            yield
        finally:
            getattr(switched, off)(*((False,) if on == off else ()))
