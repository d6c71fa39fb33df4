"""Optimizers by name, and optimizers on parameters without values."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn, optim
from torch._subclasses.fake_tensor import DataDependentOutputException

from fxmem.errors import UsageError, suggest_names
from fxmem.fakes.fake_mode import LeanDispatchMode
from fxmem.specs import parse_call
from fxmem.versions.operators import aten

OptimizerFactory: TypeAlias = Callable[[list[nn.Parameter]], optim.Optimizer]

_LR = 1e-3


class Adam8bit(optim.Optimizer):
    """Allocates the states of bitsandbytes' ``Adam8bit``, whose kernels need a GPU.

    They update in place, without temporaries. Source: ``bitsandbytes/optim/optimizer.py``,
    ``Optimizer2State.init_state`` and ``get_state_buffer``. ``lr`` changes no allocation.
    """

    _BLOCK_ELEMENTS = 256  # share a scale
    _MIN_ELEMENTS = 4096  # ``min_8bit_size``: smaller parameters have states of 32 bits
    _CODES = 256

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        self._maps: tuple[torch.Tensor, torch.Tensor] | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Makes the states that are missing; computes nothing."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter].update(self._make_state(parameter))

    def _make_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        count, device = parameter.numel(), parameter.device
        if count < self._MIN_ELEMENTS:
            make = functools.partial(torch.zeros_like, parameter, dtype=torch.float32)
            return {"state1": make(), "state2": make()}
        if self._maps is None:  # one pair of them for all parameters
            first = torch.zeros(self._CODES, device=device)
            self._maps = first, torch.zeros(self._CODES, device=device)
        blocks = -(-count // self._BLOCK_ELEMENTS)
        return {
            "state1": torch.zeros_like(parameter, dtype=torch.uint8),
            "qmap1": self._maps[0],
            "absmax1": torch.zeros(blocks, device=device),
            "state2": torch.zeros_like(parameter, dtype=torch.uint8),
            "qmap2": self._maps[1],
            "absmax2": torch.zeros(blocks, device=device),
        }


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
    **({"muon": optim.Muon} if hasattr(optim, "Muon") else {}),
    "adam8bit": Adam8bit,
}


def resolve_optimizer(
    optimizer: str | Callable[[Iterable[nn.Parameter]], optim.Optimizer] | None,
) -> OptimizerFactory | None:
    """Finds the function that makes the user's optimizer from the model's parameters.

    Parameters that do not require grad are left out. The optimizer runs on fake parameters too:
    where its ``step`` asks for a number computed from their values (Adafactor for the norm of a
    parameter, ASGD for its averaging coefficient) the answer is 1.

    Args:
        optimizer: None, a name in :data:`OPTIMIZERS` with settings or without
            (``"adamw(fused=True)"``), an ``Optimizer`` class, or a function of the parameters.

    Raises:
        UsageError: There is no such optimizer. The function returned raises it where no parameter
            requires grad, the optimizer refuses them, or its ``step`` needs a closure.
    """
    if optimizer is None:
        return None
    if isinstance(optimizer, str):
        kind, settings = parse_settings(optimizer)
        if kind not in OPTIMIZERS:
            others = f"one of {', '.join(OPTIMIZERS)}; or what makes one, file.py:function"
            hint = suggest_names(kind.lower(), OPTIMIZERS, others, most=3)
            raise UsageError(f"unknown optimizer {kind!r}", hint=hint)
        name, make = optimizer, lambda parameters: OPTIMIZERS[kind](parameters, **settings)
    elif isinstance(optimizer, optim.Optimizer):
        raise UsageError(
            f"the optimizer {type(optimizer).__name__} holds parameters already",
            hint="give a function of the parameters: lambda params: AdamW(params, lr=1e-3)",
        )
    elif callable(optimizer):
        name, make = str(getattr(optimizer, "__name__", type(optimizer).__name__)), optimizer
    else:
        raise UsageError(
            f"optimizer must be a name, a class or a function, got {optimizer!r}",
            hint="a function takes the parameters",
        )
    return functools.partial(_make_optimizer, name, make)


def parse_settings(text: str) -> tuple[str, dict[str, Any]]:
    """Splits ``"adam(fused=True)"`` into the optimizer's name and settings."""
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
            f"the optimizer {name} must be an Optimizer, got {type(optimizer).__name__}",
            hint="return the optimizer",
        )
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError:
        raise UsageError(
            f"the optimizer {name} runs the model again in its step, through a closure",
            hint="one that needs no closure, e.g. adamw",
        ) from None
    answer_values(optimizer)
    return optimizer


def answer_values(optimizer: optim.Optimizer) -> None:
    """Wraps ``optimizer.step`` so that values unknown on fake tensors are 1."""
    step = optimizer.step

    @functools.wraps(step)
    def step_with_answers(*args: Any, **kwargs: Any) -> Any:
        with _AnswerValues():  # type: ignore[no-untyped-call]
            return step(*args, **kwargs)

    optimizer.step = step_with_answers  # type: ignore[method-assign]


class _AnswerValues(LeanDispatchMode):  # type: ignore[no-untyped-call]
    """Answers 1 where ``.item()`` has no answer on a fake tensor.

    Such a number scales an update, which changes no allocation; where it decides (ASGD averages
    from step ``t0``, one million, on) 1 is the value in the first steps.
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
            if func is not aten._local_scalar_dense.default:
                raise
            is_float = args[0].dtype.is_floating_point
            return 1.0 if is_float else args[0].dtype == torch.bool or 1
