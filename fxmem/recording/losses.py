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
from fxmem.specs import strip_torch
from fxmem.tracing.contexts import read_autocast

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
"""The losses that have a name."""
_INFER = "mode='infer' (--mode infer) needs none"


class NoGradientError(TraceError):
    """Nothing to train: no parameter leads to the loss."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss function and what it compares with.

    The target is an input of the step: make it once, before the step that is measured, and
    give the same to each ``compute``.

    Attributes:
        name: For reports.
        compute: From output and target to a scalar tensor.
        make_target: From an output to the target; None where the loss takes none.
        function: The user's own, if it is one, from the output alone.
    """

    name: str
    compute: Callable[[Any, Tensor | None], Tensor]
    make_target: Callable[[Any], Tensor] | None = None
    function: Callable[[Any], object] | None = None


def resolve_loss(loss: str | Callable[[Any], Tensor] | None) -> Loss:
    """The loss that the user means.

    None is the output's own ``.loss`` (an attribute or a key) if it has one; else a scalar
    output itself; else the sum of all floating tensors in the output that require grad, each
    once, in the order of lists, tuples, mappings and dataclasses.

    The named losses compare the output if it is a tensor, its ``.logits`` if it has them, or
    its first floating tensor. ``"cross_entropy"`` and ``"nll"`` take classes from dimension 1, or
    from the last of a three-dimensional output (batch, time, classes), flattened to two
    dimensions; their targets are int64 class indices. The targets of the others are like the
    output; ``"bce"`` is ``binary_cross_entropy_with_logits``.

    Args:
        loss: None, a name in :data:`LOSSES`, or a function from the output to a scalar.

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
    if isinstance(loss, str):
        return _make_named(loss)
    name = _name_function(loss)
    _check_function(loss, name)
    return make_own_loss(name, loss)


def make_own_loss(name: str, function: Callable[[Any], object]) -> Loss:
    """The loss that a user's function computes."""
    return Loss(name, lambda output, target: _check_loss(function(output)), function=function)


def _make_named(name: str) -> Loss:
    if name in _OF_CLASSES:
        function, find, make = _OF_CLASSES[name], _flatten_logits, _make_classes
    elif name in _OF_VALUES:
        function, find, make = _OF_VALUES[name], _find_prediction, _make_values
    else:
        close = difflib.get_close_matches(name.lower().removesuffix("loss"), LOSSES, n=1)
        raise UsageError(
            f"unknown loss {name!r}",
            hint=f"did you mean {close[0]}?"
            if close
            else f"one of {', '.join(LOSSES)}; or a function of the output, file.py:function",
        )

    def compute(output: Any, target: Tensor | None) -> Tensor:
        return _check_loss(function(find(output), make(output) if target is None else target))

    return Loss(name, compute, make)


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
    total: Tensor | None = None
    for tensor in _iterate_floating(output):
        if tensor.requires_grad:
            total = tensor.sum() if total is None else total + tensor.sum()
    if total is None:
        raise _explain_missing_loss(output)
    return total


def _explain_missing_loss(output: Any) -> TraceError:
    unknown = _find_unknown(output)
    if unknown is not None:
        return _explain_unknown(unknown, output)
    if output is None:
        return TraceError("the model returned None", hint="does its forward lack a return?")
    if next(_iterate_floating(output), None) is not None:
        return NoGradientError(
            f"the model returned {_describe(output)}, and nothing in it requires grad",
            hint=f"is everything frozen, or the output detached? {_INFER}",
        )
    return TraceError(
        f"the model returned {_describe(output)}, without a floating tensor to start backward from",
        hint=f"return one, or give a loss; {_INFER}",
    )


def _find_unknown(output: Any) -> object | None:
    """The first object in an output that is not searched for tensors, and holds some."""
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, list | tuple):
        found = (_find_unknown(entry) for entry in output)
        return next((unknown for unknown in found if unknown is not None), None)
    if isinstance(output, Tensor) or dataclasses.is_dataclass(output):
        return None
    return output if _name_tensors(output) else None


def _name_tensors(owner: object) -> list[str]:
    """Attributes of an object that are floating tensors."""
    return [
        name
        for name, value in getattr(owner, "__dict__", {}).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    ]


def _explain_unknown(unknown: object, output: object) -> TraceError:
    hint = "give a function of the output, --loss file.py:function or loss="
    if unknown is output:
        hint += f", for instance lambda output: output.{_name_tensors(output)[0]}.sum()"
    return TraceError(
        f"the model returned an object of class {type(unknown).__name__}, and tensors are looked "
        "for in lists, tuples, mappings and dataclasses alone",
        hint=hint,
    )


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
    unknown = _find_unknown(output)
    if unknown is not None:
        raise _explain_unknown(unknown, output)
    raise TraceError(
        f"the model returned {_describe(output)}, without a floating tensor to compare",
        hint="give a function of the output, --loss file.py:function or loss=",
    )


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
    if isinstance(output, bool | int | float | str | None):
        return repr(output)
    name = type(output).__name__
    return f"a {name}" if type(output).__module__ == "builtins" else f"an object of class {name}"
