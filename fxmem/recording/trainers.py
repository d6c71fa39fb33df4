"""What trainers do in a step besides forward, backward and the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxmem.tracing.fxgraph import iterate_tensors

_HALVES = (torch.float16, torch.bfloat16)


def cast_to_float32(output: Any) -> Any:
    """A model's output with its tensors of half precision in float32.

    Source: ``convert_to_fp32`` in accelerate's ``utils/operations.py``, which goes through lists,
    tuples and mappings and leaves all else.

    >>> cast_to_float32({"x": (torch.zeros(2, dtype=torch.bfloat16), 3)})
    {'x': (tensor([0., 0.]), 3)}
    """
    if isinstance(output, Mapping):
        made = {name: cast_to_float32(value) for name, value in output.items()}
        return type(output)(made)  # type: ignore[call-arg]
    if isinstance(output, tuple | list):
        parts = (cast_to_float32(value) for value in output)
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    is_half = isinstance(output, Tensor) and output.dtype in _HALVES
    return output.float() if is_half else output


def clip_gradients(
    parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer | None, scaler: Any
) -> Tensor:
    """Clips the norm of all gradients, and returns that norm.

    Args:
        parameters: Those of the model.
        optimizer: That of the step, or None.
        scaler: The gradient scaler, or None.
    """
    if scaler is not None and optimizer is not None:
        scaler.unscale_(optimizer)
    return nn.utils.clip_grad_norm_(parameters, 1.0)


def copy_inputs(inputs: Any, times: int) -> list[Tensor]:
    """As many tensors like those among some inputs as other micro-batches have."""
    return [
        torch.empty_like(tensor, requires_grad=False)
        for _ in range(times)
        for tensor in iterate_tensors(inputs)
    ]
