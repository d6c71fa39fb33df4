"""A model with a plan in one line: analysed, planned and applied, or so at its first step."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import is_fake
from torch.utils._pytree import tree_leaves

from fxmem.analyzing import analyze
from fxmem.applying.applying import apply, find_autocast
from fxmem.applying.plan_search import plan
from fxmem.applying.planned_model import find_original, run_by_plan
from fxmem.errors import UsageError
from fxmem.gpus import find_gpu
from fxmem.planning.plan import Plan
from fxmem.units import resolve_bytes

_LIMITS = ("budget", "max_overhead", "max_overhead_flops")
PlanModel = Callable[[nn.Module, Any, Any], nn.Module]
"""Takes a model and a step's inputs, positional and by name; returns what runs in its place."""
_Makes = TypeVar("_Makes", bound="Callable[..., nn.Module]")


@overload
def auto(
    model: nn.Module, args: Any = None, kwargs: Mapping[str, Any] | None = None, **options: Any
) -> nn.Module: ...
@overload
def auto(model: _Makes, **options: Any) -> _Makes: ...
@overload
def auto(**options: Any) -> Callable[[_Makes], _Makes]: ...
def auto(
    model: Any = None, args: Any = None, kwargs: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """Makes a model's training step keep a limit: analyses, plans and applies.

    With inputs this happens at once. Without inputs, and as a decorator of a class of modules or
    of a function that makes one, it happens at the first training step, for that step's inputs.

    Args:
        model: The model; or a class of modules or a function that makes one, whose modules then
            plan themselves. None returns a decorator.
        args: Inputs as for :func:`fxmem.analyze`; None, without keyword inputs, waits for a step.
        kwargs: Keyword inputs, of the same kinds.
        options: Those of :func:`fxmem.plan` and, for a training step, of :func:`fxmem.analyze`.
            Without a limit, ``budget`` is the whole memory of ``gpu``, or else of this machine's
            CUDA device. CUDA's context, and memory that the allocator cannot use, come on top.

    Returns:
        With inputs, what :func:`fxmem.apply` returns, or the model itself where its step keeps
        the budget without a plan. Without inputs, the model, which plans itself; or the class, a
        function in place of the one given, or a decorator.

    Raises:
        InfeasibleError: No plan within the budget was found. A model that plans itself raises
            this in its step, like all that :func:`fxmem.analyze` raises.
        UsageError: There is no limit, or several.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(8, 64), *[nn.Tanh() for _ in range(8)], nn.Linear(64, 1))
    >>> auto(net, "4096x8", budget="1GiB", device="cpu") is net
    True
    >>> planned = auto(net, "4096x8", budget="6MiB", device="cpu", time_limit_s=1)
    >>> planned.plan.baseline_peak_bytes > 9 * 2**20 > 6 * 2**20 >= planned.plan.peak_bytes
    True
    """
    planning = {name: options.pop(name) for name in signature(plan).parameters if name in options}
    limits = [name for name in _LIMITS if planning.get(name) is not None]
    if len(limits) > 1:
        raise UsageError(f"{' and '.join(limits)} are two limits", hint="give one of them")
    if not limits:
        planning["budget"] = find_memory(**options)
    plan_step = functools.partial(_plan_step, planning, options)
    if model is None:
        return functools.partial(_plan_lazily, plan_step)
    if args is None and kwargs is None:
        return _plan_lazily(plan_step, model)
    return plan_step(model, args, kwargs)


def find_memory(gpu: str | None = None, device: str = "cuda", **_: Any) -> int:
    """Finds the memory of the GPU that is named, or of this machine's."""
    if gpu is not None:
        return find_gpu(gpu).capacity_bytes
    if device == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return int(properties.total_memory)
    raise UsageError(
        "a plan needs a limit, and there is no GPU whose memory could be one",
        hint="budget='8GiB', gpu='a100-40gb' or max_overhead=0.1",
    )


def _plan_step(
    planning: Mapping[str, Any],
    options: Mapping[str, Any],
    model: nn.Module,
    args: Any,
    kwargs: Any,
) -> nn.Module:
    """Applies a plan for some inputs; gives the model itself where its step fits without one."""
    options = {"autocast": find_autocast((args, kwargs)), **options}
    analysis = analyze(model, () if args is None else args, kwargs, **options)
    budget = planning.get("budget")
    if budget is not None and analysis.peak_bytes <= resolve_bytes(budget):
        return model
    return apply(model, plan(analysis, **planning))


def prepare_first_step(model: nn.Module, plan_model: PlanModel) -> None:
    """Makes a model call a function before its first training step, and run what that returns."""
    lazy = vars(model).get("forward")
    if isinstance(lazy, LazyForward):
        lazy.release()
    vars(model)["forward"] = LazyForward(model, plan_model)


def _plan_lazily(plan_step: PlanModel, model: Any) -> Any:
    """Makes a model, or each model that a class or a function makes, plan itself."""
    if isinstance(model, nn.Module):
        prepare_first_step(model, plan_step)
        return model
    if isinstance(model, type) and issubclass(model, nn.Module):
        construct = model.__init__

        @functools.wraps(construct)
        def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            construct(self, *args, **kwargs)
            prepare_first_step(self, plan_step)

        model.__init__ = init  # type: ignore[method-assign]
        return model
    if not callable(model):
        raise UsageError(
            f"{type(model).__name__} is not a model, and makes none",
            hint="a module, a class of modules, or a function that returns one",
        )

    @functools.wraps(model)
    def make(*args: Any, **kwargs: Any) -> Any:
        return _plan_lazily(plan_step, model(*args, **kwargs))

    return make


def unapply(model: nn.Module) -> nn.Module:
    """Gives back the model that a plan was applied to, with parameters and attributes as they are.

    Args:
        model: From :func:`fxmem.apply`; or from :func:`fxmem.auto`, which then plans no more.

    Raises:
        UsageError: No plan was applied to it.
    """
    original = find_original(model) or model
    lazy = vars(original).get("forward")
    if isinstance(lazy, LazyForward):
        lazy.release()
    elif original is model:
        raise UsageError(
            f"no plan was applied to this {type(model).__name__}", hint="it is as it was"
        )
    return original


class LazyForward:
    """The ``forward`` of a model that plans itself, as an attribute of the model.

    A copy of the model plans for itself.
    """

    def __init__(self, model: nn.Module, plan_model: PlanModel) -> None:
        self.model, self._plan_model = model, plan_model
        self._replaced: Callable[..., Any] | None = vars(model).get("forward")
        self._planned: nn.Module | None = None
        self._is_running = False

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The model's own ``forward``."""
        bound: Callable[..., Any] = type(self.model).forward.__get__(self.model)
        return self._replaced or bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a training step by the plan, which the first one makes; else the model's own."""
        is_step = self.model.training and torch.is_grad_enabled()
        if self._is_running or not is_step or torch.compiler.is_compiling():
            return self.__wrapped__(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        if peek_interpreter_stack() is not None or any(map(is_fake, leaves)):
            return self.__wrapped__(*args, **kwargs)
        self._is_running = True
        try:
            if self._planned is None:
                self._planned = self._plan(args, kwargs)
            return run_by_plan(self._planned, self.__wrapped__, *args, **kwargs)
        finally:
            self._is_running = False

    def _plan(self, args: Any, kwargs: Any) -> nn.Module:
        """Makes the module whose ``forward`` runs from now on, while the model is as it was."""
        model, planned = self.model, None
        outer = vars(model).get("forward", self)  # accelerate lays autocast around this one
        self.release()
        try:
            planned = self._plan_model(model, args, kwargs)
        finally:
            if planned is not model or outer is not self:
                vars(model)["forward"] = outer
        if planned is not model and not hasattr(model, "plan"):
            vars(model)["plan"] = planned.plan
        return planned

    def release(self) -> None:
        """Makes the model run its own code from now on."""
        held = vars(self.model)
        held.pop("forward", None)
        if self._replaced is not None:
            held["forward"] = self._replaced
        if isinstance(held.get("plan"), Plan):
            del held["plan"]

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyForward:
        copied = LazyForward(copy.deepcopy(self.model, memo), self._plan_model)
        copied._replaced = copy.deepcopy(self._replaced, memo)
        return copied

    def __reduce__(self) -> Any:
        return LazyForward, (self.model, self._plan_model)
