"""Losses: the scalar that backward starts from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fxmem.errors import TraceError, UsageError, suggest_names
from fxmem.fakes.containers import iterate_tensors
from fxmem.specs import strip_torch
from fxmem.tracing.conditions import read_autocast

_OF_CLASSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": functional.cross_entropy,
    "nll": functional.nll_loss,
}
_OF_VALUES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "smooth_l1": functional.smooth_l1_loss,
    "bce": functional.binary_cross_entropy_with_logits,
}
LOSSES = (*_OF_CLASSES, *_OF_VALUES)


class NoGradientError(TraceError):
    """Nothing to train: no parameter leads to the loss."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss function and its target, an input that every step shares."""

    name: str
    compute: Callable[[Any, Tensor | None], Tensor]  # from output and target to a scalar
    make_target: Callable[[Any], Tensor] | None = None  # from an output; None for no target
    function: Callable[[Any], object] | None = None  # the user's own function of the output


def resolve_loss(loss: str | Callable[[Any], Tensor] | None) -> Loss:
    """Finds the loss that the user means.

    None is the output's own ``.loss`` (an attribute or a key) if it has one; else a scalar
    output itself; else the sum of all floating tensors in the output that require grad, each
    once, in the order of lists, tuples, mappings and dataclasses.

    The named losses compare the output if it is a tensor, its ``.logits`` if it has them, or
    its first floating tensor. ``"cross_entropy"`` and ``"nll"`` take classes from dimension 1, or
    from the last of a three-dimensional output (batch, time, classes), flattened to two
    dimensions; their targets are int64 class indices. The targets of the others are like the
    output; ``"bce"`` is ``binary_cross_entropy_with_logits``.

    Raises:
        UsageError: There is no such loss. The returned ``compute`` and ``make_target`` raise
            TraceError for an output that they cannot take, or a loss that is not a scalar.
    """
    if loss is None:
        return Loss("sum of outputs", lambda output, target: _check_loss(_sum_output(output)))
    if isinstance(loss, str):
        return _make_named(loss)
    name = str(getattr(loss, "__name__", type(loss).__name__))
    _check_function(loss, name)
    return Loss(name, lambda output, target: _check_loss(loss(output)), function=loss)


def _make_named(name: str) -> Loss:
    if name in _OF_CLASSES:
        function, find, make = _OF_CLASSES[name], _flatten_logits, _make_classes
    elif name in _OF_VALUES:
        function, find, make = _OF_VALUES[name], _find_prediction, _make_values
    else:
        others = f"one of {', '.join(LOSSES)}; or a function of the output, file.py:function"
        hint = suggest_names(name.lower().removesuffix("loss"), LOSSES, others)
        raise UsageError(f"unknown loss {name!r}", hint=hint)

    def compute(output: Any, target: Tensor | None) -> Tensor:
        return _check_loss(function(find(output), make(output) if target is None else target))

    return Loss(name, compute, make)


def _check_function(loss: object, name: str) -> None:
    """Refuses a criterion that compares with a target, or the class of one."""
    if not callable(loss) or isinstance(loss, type):
        what = f"the loss {name} is a class" if callable(loss) else f"a loss cannot be {loss!r}"
        raise UsageError(what, hint="give a function of the output, loss=lambda y: y.mean()")
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
            f"the loss is a {type(loss).__name__}, not a tensor",
            hint="return the tensor itself, not its .item()",
        )
    if loss.numel() != 1:
        raise TraceError(
            f"the loss has shape {'x'.join(map(str, loss.shape))}, it must be a scalar",
            hint="take its .mean()",
        )
    if not loss.requires_grad:
        raise NoGradientError(
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
    floating = _list_floating(output)
    total: Tensor | None = None
    for tensor in floating:
        if tensor.requires_grad:
            total = tensor.sum() if total is None else total + tensor.sum()
    if total is not None:
        return total
    if output is None:
        raise TraceError("the model returned None", hint="does its forward lack a return?")
    if floating:
        raise NoGradientError(
            f"the model returned {_describe(output)}, and nothing in it requires grad",
            hint="is everything frozen, or the output detached? mode='infer' needs no loss",
        )
    raise _explain_output(output)


def _explain_output(output: object) -> TraceError:
    return TraceError(
        f"the model returned {_describe(output)}, and no floating tensor was found in it"
        " (in lists, tuples, mappings and dataclasses)",
        hint="give a function of the output, --loss file.py:function or loss=;"
        " mode='infer' needs no loss",
    )


def _find_entry(output: Any, name: str) -> Any:
    """Reads ``output.name`` or ``output[name]``; None if there is neither."""
    if isinstance(output, Mapping) and name in output:
        return output[name]
    return None if isinstance(output, Tensor) else getattr(output, name, None)


def _list_floating(output: Any) -> list[Tensor]:
    """Lists the floating tensors in an output, in order, each once."""
    by_id = {id(t): t for t in iterate_tensors(output) if t.is_floating_point()}
    return [*by_id.values()]


def _find_prediction(output: Any) -> Tensor:
    """Finds the tensor that a named loss compares with its target."""
    logits = _find_entry(output, "logits")
    if isinstance(logits, Tensor):
        return logits
    for tensor in _list_floating(output):
        return tensor
    raise _explain_output(output)


def _flatten_logits(output: Any) -> Tensor:
    logits = _find_prediction(output)
    if logits.ndim == 0:
        raise TraceError(
            "the model returned a scalar, and this loss needs one value per class",
            hint="leave the loss out if it is the loss already",
        )
    return logits.flatten(0, 1) if logits.ndim == 3 else logits


def _make_classes(output: Any) -> Tensor:
    logits = _flatten_logits(output)
    shape = (*logits.shape[:1], *logits.shape[2:]) if logits.ndim > 1 else ()
    return torch.zeros(shape, dtype=torch.int64, device=logits.device)


def _make_values(output: Any) -> Tensor:
    prediction = _find_prediction(output)
    # A batch of data is not autocast: an output that was has a target of float32 beside it.
    autocast = any(read_autocast())
    return torch.zeros_like(prediction, dtype=torch.float32 if autocast else prediction.dtype)


def _describe(output: object) -> str:
    if isinstance(output, Tensor):
        shape = "x".join(map(str, output.shape)) or "scalar"
        return f"a tensor {shape}:{strip_torch(output.dtype)}"
    return f"an object of class {type(output).__name__}"
