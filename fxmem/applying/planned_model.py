"""Planned models: objects beside the users' models, whose forward runs by a plan.

A planned model is of a subclass of its model's class, and has the very same attributes: parameters,
buffers, submodules, hooks and mode are one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from fxmem.planning.plan import Plan


class PlannedForward(Protocol):
    """The forward of a model by a plan.

    Attributes:
        plan: The plan, where :func:`fxmem.apply` was given one.
        calls: The number of calls that ran by it.
    """

    plan: Plan | None
    calls: int

    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs by the plan, or as the model's own forward does where the plan is not for that."""


class _Planned:
    _fxmem_original: nn.Module
    _fxmem_forward: PlannedForward
    _fxmem_hiding: Any  # a ``forward`` that hid the class's when the plan was applied

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator,no-untyped-call]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = super()
        own: Any = vars(self).get("forward")
        if own is None or own is not self._fxmem_hiding:
            return model.__call__(*args, **kwargs)
        run = functools.partial(self._fxmem_forward.run, own)
        vars(self)["forward"] = functools.update_wrapper(run, own)
        try:
            return model.__call__(*args, **kwargs)
        finally:
            vars(self)["forward"] = own

    def __reduce_ex__(self, protocol: Any) -> Any:
        return make_planned, (self._fxmem_original, self._fxmem_forward)


def make_planned(original: nn.Module, forward: PlannedForward) -> nn.Module:
    """Makes a planned model."""
    base = type(original)
    hiding: Any = vars(original).get("forward")

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator,no-untyped-call]
    @functools.wraps(base.forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward.run(base.forward.__get__(self), *args, **kwargs)

    attributes = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    attributes |= {
        "_fxmem_original": original,
        "_fxmem_forward": forward,
        "_fxmem_hiding": staticmethod(hiding),
        "forward": run,
    }
    added = {"plan": forward.plan, "plan_calls": property(lambda self: forward.calls)}
    attributes |= {name: value for name, value in added.items() if not hasattr(original, name)}
    kind: Any = type(base.__name__, (_Planned, base), attributes)
    planned: nn.Module = object.__new__(kind)
    object.__setattr__(planned, "__dict__", vars(original))
    return planned


def find_original(model: nn.Module) -> nn.Module | None:
    """Finds the model that a plan was applied to; None where none was."""
    return model._fxmem_original if isinstance(model, _Planned) else None


def run_by_plan(planned: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls the forward of a model as its planned model does; a model may have no plan."""
    if not isinstance(planned, _Planned):
        return forward(*args, **kwargs)
    return planned._fxmem_forward.run(forward, *args, **kwargs)
