"""A model with a plan in one line: analysed, planned and applied, or so at its first step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from fxmem.api import analyze
from fxmem.devices import find_gpu
from fxmem.errors import UsageError
from fxmem.planning.plan import Plan
from fxmem.planning.planner import TIME_LIMIT_S, plan
from fxmem.transform.applying import apply
from fxmem.transform.module import PlannedModule
from fxmem.transform.wrapping import PlannedForward, find_original
from fxmem.units import parse_bytes

_HELD = "_fxmem_held"
_Makes = TypeVar("_Makes", bound=Callable[..., nn.Module])


@dataclass(frozen=True, slots=True)
class _Choices:
    """What :func:`auto` was asked for."""

    limits: Mapping[str, Any]
    planning: Mapping[str, Any]
    analysis: Mapping[str, Any]

    def make_planned(self, model: nn.Module, args: Any, kwargs: Any) -> nn.Module:
        """The model with a plan for some inputs; the model itself where it fits without."""
        analysis = analyze(model, () if args is None else args, kwargs, **self.analysis)
        budget = self.limits.get("budget")
        if budget is not None:
            budget_bytes = parse_bytes(budget) if isinstance(budget, str) else budget
            if analysis.peak_bytes <= budget_bytes:
                return model
        return apply(model, plan(analysis, **self.limits, **self.planning))


@overload
def auto(
    model: nn.Module, args: Any = None, kwargs: Mapping[str, Any] | None = None, **options: Any
) -> nn.Module: ...
@overload
def auto(model: _Makes, **options: Any) -> _Makes: ...
@overload
def auto(**options: Any) -> Callable[[_Makes], _Makes]: ...
def auto(
    model: Any = None,
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: str | int | None = None,
    max_overhead: float | None = None,
    max_overhead_flops: float | None = None,
    style: str | None = None,
    time_limit_s: float = TIME_LIMIT_S,
    device: str = "cuda",
    gpu: str | None = None,
    **options: Any,
) -> Any:
    """A model whose training step keeps a limit: analysed, planned and applied.

    With inputs it does so at once. Without them, and as a decorator of a class of modules or of a
    function that makes one, it does so at the first training step, for the inputs of that.

    Args:
        model: The model; or a class of modules or a function that makes one, whose modules then
            plan themselves. None makes a decorator of what follows.
        args: Inputs as for :func:`fxmem.analyze`; None, and no keywords, waits for a step.
        kwargs: Keyword inputs, likewise.
        budget: What the step may take, as for :func:`fxmem.plan`. Where no limit is given, all that
            ``gpu`` has; or, without a name, the CUDA device of this machine. That is as much as
            CUDA reports: its context, and what the allocator cannot use, come on top of the step.
        max_overhead: As for :func:`fxmem.plan`.
        max_overhead_flops: As for :func:`fxmem.plan`.
        style: As for :func:`fxmem.plan`.
        time_limit_s: As for :func:`fxmem.plan`.
        device: As for :func:`fxmem.analyze`.
        gpu: As for :func:`fxmem.analyze`.
        options: All else that :func:`fxmem.analyze` takes for a training step: ``optimizer``,
            ``loss``, ``autocast``, ``alloc_conf`` and so on.

    Returns:
        With inputs what :func:`fxmem.apply` returns; the model itself where its step keeps the
            budget without a plan. Without inputs the model, which plans itself; or the class or a
            function in the place of the one given; or a decorator.

    Raises:
        InfeasibleError: No plan keeps the budget. A model that plans itself raises it in its step,
            as all that :func:`fxmem.analyze` raises.
        UsageError: There is no limit, or several.

    >>> net = nn.Sequential(nn.Linear(8, 64), *[nn.Tanh() for _ in range(8)], nn.Linear(64, 1))
    >>> auto(net, "4096x8", budget="1GiB", device="cpu") is net
    True
    >>> planned = auto(net, "4096x8", budget="6MiB", device="cpu", time_limit_s=1)
    >>> planned.plan.baseline_peak_bytes > 9 * 2**20 > 6 * 2**20 >= planned.plan.peak_bytes
    True
    """
    limits = {
        "budget": budget,
        "max_overhead": max_overhead,
        "max_overhead_flops": max_overhead_flops,
    }
    given = {name: limit for name, limit in limits.items() if limit is not None}
    choices = _Choices(
        limits=given or {"budget": _find_capacity(device, gpu)},
        planning={"style": style, "time_limit_s": time_limit_s},
        analysis={"device": device, "gpu": gpu, **options},
    )
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} are two limits", hint="give one of them")
    if model is None:
        return functools.partial(_plan_lazily, choices=choices)
    if args is None and kwargs is None:
        return _plan_lazily(model, choices=choices)
    return choices.make_planned(model, args, kwargs)


def _find_capacity(device: str, gpu: str | None) -> int:
    if gpu is not None:
        return find_gpu(gpu).capacity_bytes
    if device == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    raise UsageError(
        "a plan needs a limit, and here is no GPU whose memory it could be",
        hint="budget='8GiB', gpu='a100-40gb' or max_overhead=0.1",
    )


def _plan_lazily(model: Any, *, choices: _Choices) -> Any:
    """A model, a class or a function, each of whose models plans itself."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        _route_calls(model, choices)
        return model
    if isinstance(model, nn.Module):
        model.__class__ = _make_kind(type(model), choices)
        return model
    if not callable(model):
        raise UsageError(
            f"{type(model).__name__} is no model, and makes none",
            hint="a module, a class of modules, or a function that returns one",
        )

    @functools.wraps(model)
    def make(*args: Any, **kwargs: Any) -> Any:
        return _plan_lazily(model(*args, **kwargs), choices=choices)

    return make


def _make_kind(base: type[nn.Module], choices: _Choices) -> type[nn.Module]:
    """A class for one model, which is to all appearances the model's own."""

    def reduce(self: nn.Module, protocol: Any) -> Any:
        state = self.__getstate__()  # type: ignore[no-untyped-call]
        return _make_again, (base, choices), state

    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    kind: Any = type(base.__name__, (base,), {**names, "__reduce_ex__": reduce})
    _route_calls(kind, choices)
    made: type[nn.Module] = kind
    return made


def _make_again(base: type[nn.Module], choices: _Choices) -> nn.Module:
    """What a copy, or what a file is read into, begins as."""
    kind = _make_kind(base, choices)
    return kind.__new__(kind)


def _route_calls(kind: type[nn.Module], choices: _Choices) -> None:
    """Has the calls of a class's models run by plans that the first of them makes."""
    own = vars(kind).get("__call__")

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        planned = _find_planned(self, args, kwargs, choices)
        if planned is not None:
            return planned(*args, **kwargs)
        if own is not None:
            return own(self, *args, **kwargs)
        above: Any = super(kind, self)
        return above.__call__(*args, **kwargs)

    kind.__call__ = call  # type: ignore[method-assign]


class _Held:
    """What a model was given as a plan; a copy of the model makes its own.

    Attributes:
        planned: The module that runs in the model's place; None where the model itself does.
    """

    def __init__(self, planned: nn.Module | None = None) -> None:
        self.planned = planned

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def _find_planned(
    model: nn.Module, args: Any, kwargs: Mapping[str, Any], choices: _Choices
) -> nn.Module | None:
    """What runs a call in the place of the model; None where the model itself does."""
    is_step = model.training and torch.is_grad_enabled()
    if not is_step or find_original(model) is not None:
        return None
    held: _Held | None = vars(model).get(_HELD)
    if held is not None:
        return held.planned
    # A compiler's call and an analysis are no steps.
    leaves = () if torch.compiler.is_compiling() else tree_leaves((args, kwargs))
    if not leaves or any(isinstance(leaf, FakeTensor) for leaf in leaves):
        return None
    if isinstance(vars(model).get("plan"), Plan):  # of what it is a copy of
        del vars(model)["plan"]
    planned = choices.make_planned(model, args, kwargs)
    if not isinstance(planned, PlannedModule):
        if planned is not model:
            _become(model, planned)
        vars(model)[_HELD] = _Held()
        return None
    if not hasattr(model, "plan"):
        vars(model)["plan"] = planned.plan
    vars(model)[_HELD] = _Held(planned)
    return planned


def _become(model: nn.Module, planned: nn.Module) -> None:
    """Makes a model the one that a plan of modules has made of it.

    What its attributes lead to has to be what runs: a rate that is changed, a layer that is frozen.
    """
    original = object.__new__(type(model))
    vars(original).update({**vars(model), _HELD: _Held()})
    vars(model).update(vars(planned))
    planned.__dict__ = model.__dict__  # what the modules refer to as their parent
    forward: PlannedForward = vars(planned)["forward"]
    vars(model)["forward"] = forward.move(model, original)
