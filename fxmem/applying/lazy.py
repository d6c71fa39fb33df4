"""Models that get their plan at their first training step."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from fxmem.applying.module import PlannedModule
from fxmem.applying.modules import run_segments
from fxmem.applying.surroundings import is_transforming
from fxmem.errors import UsageError
from fxmem.planning.plan import Plan

MakePlanned = Callable[[nn.Module, Any, Any], nn.Module]
"""From a model and the arguments of a step to the model with a plan."""


def plan_lazily(model: Any, make_planned: MakePlanned) -> Any:
    """Has a model, or each model that a class or a function makes, plan itself."""
    if isinstance(model, nn.Module):
        lazy = find_lazy(model)
        if lazy is not None:
            lazy.release()
        vars(model)["forward"] = LazyForward(model, make_planned)
        return model
    if isinstance(model, type) and issubclass(model, nn.Module):
        construct = model.__init__

        @functools.wraps(construct)
        def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            construct(self, *args, **kwargs)
            plan_lazily(self, make_planned)

        model.__init__ = init  # type: ignore[method-assign]
        return model
    if not callable(model):
        raise UsageError(
            f"{type(model).__name__} is not a model, and makes none",
            hint="a module, a class of modules, or a function that returns one",
        )

    @functools.wraps(model)
    def make(*args: Any, **kwargs: Any) -> Any:
        return plan_lazily(model(*args, **kwargs), make_planned)

    return make


def find_lazy(model: nn.Module) -> LazyForward | None:
    """Finds what stands before the ``forward`` of a model that plans itself."""
    forward = vars(model).get("forward")
    return forward if isinstance(forward, LazyForward) else None


class LazyForward:
    """The ``forward`` of a model that plans itself, as an attribute of the model.

    Args:
        model: The model; a copy of it plans for itself.
        make_planned: Analyses, plans and applies.
    """

    def __init__(self, model: nn.Module, make_planned: MakePlanned) -> None:
        self.model = model
        self._make_planned = make_planned
        self._replaced: Callable[..., Any] | None = vars(model).get("forward")
        self._planned: nn.Module | None = None
        self._is_running = False

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The model's own ``forward``."""
        bound: Callable[..., Any] = type(self.model).forward.__get__(self.model)
        return self._replaced or bound

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__wrapped__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a training step by the plan, which the first one makes; else the model's own."""
        is_step = self.model.training and torch.is_grad_enabled()
        if self._is_running or not is_step or torch.compiler.is_compiling():
            return self.__wrapped__(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        if is_transforming() or any(isinstance(leaf, FakeTensor) for leaf in leaves):
            return self.__wrapped__(*args, **kwargs)
        self._is_running = True
        try:
            if self._planned is None:
                self._planned = self._plan(args, kwargs)
            if isinstance(self._planned, PlannedModule):
                return self._planned.forward(*args, **kwargs)
            with run_segments(self._planned):
                return self.__wrapped__(*args, **kwargs)
        finally:
            self._is_running = False

    def _plan(self, args: Any, kwargs: Any) -> nn.Module:
        """Makes the module whose ``forward`` runs from now on."""
        model = self.model
        self.release()
        try:
            planned = self._make_planned(model, args, kwargs)
        except BaseException:
            vars(model)["forward"] = self
            raise
        if planned is not model:
            vars(model)["forward"] = self
            if not hasattr(model, "plan"):
                vars(model)["plan"] = planned.plan
        return planned

    def release(self) -> None:
        """Has the model run its own code from now on."""
        held = vars(self.model)
        del held["forward"]
        if self._replaced is not None:
            held["forward"] = self._replaced
        if isinstance(held.get("plan"), Plan):
            del held["plan"]

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyForward:
        copied = LazyForward(copy.deepcopy(self.model, memo), self._make_planned)
        copied._replaced = copy.deepcopy(self._replaced, memo)
        return copied

    def __reduce__(self) -> Any:
        return LazyForward, (self.model, self._make_planned)
