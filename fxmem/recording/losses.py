"""From the model's output to the scalar that backward starts from."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fxmem.errors import TraceError, UsageError

LOSSES = ("cross_entropy", "mse")
"""The losses that have a name."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss function and what it compares with.

    The target is an input of the step: make it once, before the step that is measured, and
    give the same to each ``compute``.

    Attributes:
        name: For reports.
        compute: From output and target to a scalar tensor.
        make_target: From an output to the target; None where the loss takes none.
    """

    name: str
    compute: Callable[[Any, Tensor | None], Tensor]
    make_target: Callable[[Any], Tensor] | None = None


def resolve_loss(loss: str | Callable[[Any], Tensor] | None) -> Loss:
    """The loss that the user means.

    None is the output's own ``.loss`` (an attribute or a key) if it has one; else a scalar
    output itself; else the sum of all floating tensors in the output that require grad, each
    once, in the order of lists, tuples, mappings and dataclasses.

    The named losses compare the output if it is a tensor, its ``.logits`` if it has them, or
    its first floating tensor. ``"cross_entropy"`` takes classes from dimension 1, or from the
    last of a three-dimensional output (batch, time, classes), flattened to two dimensions;
    its targets are int64 class indices. The targets of ``"mse"`` are like the output.

    Args:
        loss: None, ``"cross_entropy"``, ``"mse"``, or a function from the output to a scalar.

    Raises:
        UsageError: It is none of these. The returned ``compute`` and ``make_target`` raise
            TraceError for an output that they cannot take, or a loss that is no scalar.

    >>> mse = resolve_loss("mse")
    >>> output = torch.ones(2, 3, requires_grad=True)
    >>> mse.compute(output, mse.make_target(output)).item()
    1.0
    """
    if loss is None:
        return Loss("sum of outputs", lambda output, target: _check_loss(_sum_output(output)))
    if loss == "cross_entropy":
        return Loss("cross_entropy", _compute_cross_entropy, _make_classes)
    if loss == "mse":
        return Loss("mse", _compute_mse, lambda out: torch.zeros_like(_find_prediction(out)))
    if isinstance(loss, str):
        close = difflib.get_close_matches(loss, LOSSES, n=1)
        raise UsageError(
            f"unknown loss {loss!r}",
            hint=f"did you mean {close[0]}?" if close else f"one of {', '.join(LOSSES)}",
        )
    name = _name_function(loss)
    _check_function(loss, name)
    return Loss(name, lambda output, target: _check_loss(loss(output)))


def _name_function(loss: object) -> str:
    return str(getattr(loss, "__name__", type(loss).__name__))


def _check_function(loss: object, name: str) -> None:
    hint = "give a function of the output, e.g. loss=lambda output: output.mean()"
    if not callable(loss):
        raise UsageError(f"a loss cannot be of type {type(loss).__name__}", hint=hint)
    if isinstance(loss, type):
        raise UsageError(f"the loss {name} is a class", hint=hint)
    try:
        # A module is called through __call__, which takes anything.
        signature = inspect.signature(getattr(loss, "forward", loss))
    except (ValueError, TypeError):
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise UsageError(
            f"the loss {name} cannot be called with the output alone: {error}",
            hint="wrap it: loss=lambda output: criterion(output, target)",
        ) from None


def _check_loss(loss: object) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TraceError(
            f"the loss is of type {type(loss).__name__}, no tensor",
            hint="return the tensor itself, not its .item()",
        )
    if loss.numel() != 1:
        shape = "x".join(map(str, loss.shape))
        raise TraceError(
            f"the loss has shape {shape}, it must be a scalar", hint="take its .mean()"
        )
    if not loss.requires_grad:
        raise TraceError(
            "the loss does not require grad: no parameter leads to it",
            hint="is everything frozen, or the output detached? mode='infer' needs no loss",
        )
    return loss


def _sum_output(output: Any) -> Tensor:
    own = _find_entry(output, "loss")
    if own is not None:
        return own  # type: ignore[no-any-return]
    if isinstance(output, Tensor) and output.ndim == 0 and output.requires_grad:
        return output
    total: Tensor | None = None
    for tensor in _iterate_floating(output):
        if tensor.requires_grad:
            total = tensor.sum() if total is None else total + tensor.sum()
    if total is None:
        raise TraceError(
            f"the model returned {_describe(output)}: no floating tensor that requires grad",
            hint="pass loss=..., or mode='infer' for a model that is not trained",
        )
    return total


def _find_entry(output: Any, name: str) -> Any:
    """``output.name`` or ``output[name]``; None if there is neither."""
    if isinstance(output, Mapping) and name in output:
        return output[name]
    return None if isinstance(output, Tensor) else getattr(output, name, None)


def _iterate_floating(output: Any) -> Iterator[Tensor]:
    """The floating tensors in an output, in order, each once."""
    seen: set[int] = set()
    for tensor in _iterate_tensors(output):
        if tensor.is_floating_point() and id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def _iterate_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _iterate_tensors(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _iterate_tensors(entry)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _iterate_tensors(getattr(value, field.name, None))


def _find_prediction(output: Any) -> Tensor:
    """The tensor that a named loss compares with its target."""
    logits = _find_entry(output, "logits")
    if isinstance(logits, Tensor):
        return logits
    for tensor in _iterate_floating(output):
        return tensor
    raise TraceError(
        f"the model returned {_describe(output)}: no floating tensor to compute the loss from",
        hint="pass loss=lambda output: ...",
    )


def _flatten_logits(output: Any) -> Tensor:
    logits = _find_prediction(output)
    if logits.ndim == 0:
        raise TraceError(
            "the model returned a scalar: cross_entropy needs one value per class",
            hint="pass loss=None if it is the loss already",
        )
    return logits.flatten(0, 1) if logits.ndim == 3 else logits


def _make_classes(output: Any) -> Tensor:
    logits = _flatten_logits(output)
    shape = (*logits.shape[:1], *logits.shape[2:]) if logits.ndim > 1 else ()
    return torch.zeros(shape, dtype=torch.int64, device=logits.device)


def _compute_cross_entropy(output: Any, target: Tensor | None) -> Tensor:
    target = _make_classes(output) if target is None else target
    return _check_loss(functional.cross_entropy(_flatten_logits(output), target))


def _compute_mse(output: Any, target: Tensor | None) -> Tensor:
    prediction = _find_prediction(output)
    target = torch.zeros_like(prediction) if target is None else target
    return _check_loss(functional.mse_loss(prediction, target))


def _describe(output: object) -> str:
    if isinstance(output, Tensor):
        shape = "x".join(map(str, output.shape)) or "scalar"
        return f"a tensor {shape}:{str(output.dtype).removeprefix('torch.')}"
    return "None" if output is None else f"a {type(output).__name__}"
