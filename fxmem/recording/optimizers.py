"""Optimizers by name, and any optimizer run on parameters without values."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn, optim
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxmem.errors import TraceError, UsageError
from fxmem.recording.adam8bit import Adam8bit
from fxmem.specs import parse_call
from fxmem.tracing.dispatch import LeanDispatchMode

OptimizerFactory: TypeAlias = Callable[[list[nn.Parameter]], optim.Optimizer]

_LR = 1e-3

OPTIMIZERS: Mapping[str, Callable[..., optim.Optimizer]] = {
    "sgd": functools.partial(optim.SGD, lr=_LR),
    "sgd-momentum": functools.partial(optim.SGD, lr=_LR, momentum=0.9),
    "sgd-nesterov": functools.partial(optim.SGD, lr=_LR, momentum=0.9, nesterov=True),
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "adamax": optim.Adamax,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
    "rmsprop": optim.RMSprop,
    "rprop": optim.Rprop,
    "adafactor": optim.Adafactor,
    "asgd": optim.ASGD,
    "muon": optim.Muon,
    "adam8bit": Adam8bit,
}
"""The optimizers that have a name, with torch's defaults."""


def resolve_optimizer(
    optimizer: str | Callable[[Iterable[nn.Parameter]], optim.Optimizer] | None,
) -> OptimizerFactory | None:
    """What makes the optimizer that the user means from the model's parameters.

    Parameters that do not require grad are left out. The optimizer made runs on fake parameters
    too: where its ``step`` asks for a number computed from their values (Adafactor for the norm
    of a parameter, ASGD for its averaging coefficient) it is told 1.

    Args:
        optimizer: None for none, a name in :data:`OPTIMIZERS`, with settings in parentheses if
            need be (``"adamw(fused=True)"``), an ``Optimizer`` class, or a function from the
            parameters to an optimizer.

    Raises:
        UsageError: There is no such optimizer. The function returned raises it where no
            parameter requires grad, where the optimizer refuses the parameters, or where its
            ``step`` needs a closure.

    >>> make = resolve_optimizer("adamw")
    >>> type(make([nn.Parameter(torch.zeros(3))])).__name__
    'AdamW'
    """
    if optimizer is None:
        return None
    if isinstance(optimizer, str):
        name, make = optimizer, _find_named(optimizer)
    elif isinstance(optimizer, optim.Optimizer):
        raise UsageError(
            f"the optimizer {type(optimizer).__name__} holds parameters already",
            hint="give a function of the parameters: lambda params: AdamW(params, lr=1e-3)",
        )
    elif callable(optimizer):
        name, make = str(getattr(optimizer, "__name__", type(optimizer).__name__)), optimizer
    else:
        raise UsageError(
            f"an optimizer cannot be of type {type(optimizer).__name__}",
            hint="give a name, a class or a function of the parameters",
        )
    return functools.partial(_make_optimizer, name, make)


def _find_named(text: str) -> Callable[..., Any]:
    name, settings = parse_settings(text)
    if name not in OPTIMIZERS:
        close = difflib.get_close_matches(name.lower(), OPTIMIZERS, n=3)
        raise UsageError(
            f"unknown optimizer {name!r}",
            hint=f"did you mean {' or '.join(close)}?"
            if close
            else f"one of {', '.join(OPTIMIZERS)}; or what makes one, file.py:function",
        )
    return functools.partial(OPTIMIZERS[name], **settings)


def parse_settings(text: str) -> tuple[str, dict[str, Any]]:
    """The name of an optimizer and its settings.

    Raises:
        UsageError: The settings are no names with literals.
    """
    return parse_call(text, "optimizer", "adam(fused=True, lr=1e-3)")


def _make_optimizer(
    name: str, make: Callable[..., Any], parameters: Sequence[nn.Parameter]
) -> optim.Optimizer:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise UsageError(
            f"the optimizer {name} has nothing to train: no parameter requires grad",
            hint="optimizer=None, or mode='infer'",
        )
    try:
        optimizer = make(trained)
    except Exception as error:
        raise UsageError(
            f"the optimizer {name} does not take these parameters: {error}",
            hint="give a function of the parameters that makes it",
        ) from error
    if not isinstance(optimizer, optim.Optimizer):
        raise UsageError(
            f"the optimizer {name} is of type {type(optimizer).__name__}, no torch.optim.Optimizer",
            hint="return the optimizer",
        )
    if _needs_closure(optimizer):
        raise UsageError(
            f"the optimizer {name} runs the model again in its step, through a closure",
            hint="one that needs no closure, e.g. adamw",
        )
    answer_values(optimizer)
    return optimizer


def _needs_closure(optimizer: optim.Optimizer) -> bool:
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError:
        return True
    return False


def answer_values(optimizer: optim.Optimizer) -> None:
    """Wraps its ``step`` so that values unknown on fake tensors are answered, with 1."""
    step = optimizer.step

    @functools.wraps(step)
    def step_with_answers(*args: Any, **kwargs: Any) -> Any:
        with _AnswerValues():  # type: ignore[no-untyped-call]
            return step(*args, **kwargs)

    optimizer.step = step_with_answers  # type: ignore[method-assign]


@contextlib.contextmanager
def refuse_real_parameters() -> Iterator[None]:
    """Lets no optimizer that the user has step while a step runs on copies.

    Raises:
        TraceError: One does, within the context: a hook reached it in a way that no copy follows.
    """

    def check(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        if not all(isinstance(parameter, FakeTensor) for parameter in parameters):
            raise TraceError(
                f"the step runs an optimizer ({type(optimizer).__name__}) of parameters that are "
                "not the analysed copy's",
                hint="keep it on the model, or where the hook that runs it closes over it",
            )

    handle = register_optimizer_step_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


class _AnswerValues(LeanDispatchMode):  # type: ignore[no-untyped-call]
    """Answers 1 where ``.item()`` has no answer on a fake tensor.

    Such a number scales an update, which changes no allocation; and where it decides (ASGD
    averages only from the step ``t0``, one million, on) 1 is what the first steps have.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            is_float = args[0].dtype.is_floating_point
            return 1.0 if is_float else args[0].dtype == torch.bool or 1
