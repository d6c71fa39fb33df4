"""A model with a plan in one line: analysed, planned and applied, or so at its first step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, overload

import torch
from torch import nn

from fxmem.api import analyze
from fxmem.applying.applying import apply
from fxmem.applying.lazy import plan_lazily
from fxmem.applying.surroundings import find_autocast, run_apart
from fxmem.errors import UsageError
from fxmem.gpus import find_gpu
from fxmem.planning.planner import TIME_LIMIT_S, plan
from fxmem.units import resolve_bytes

_Makes = TypeVar("_Makes", bound=Callable[..., nn.Module])


@dataclass(frozen=True, slots=True)
class _Choices:
    """What :func:`auto` was asked for."""

    limits: Mapping[str, Any]
    planning: Mapping[str, Any]
    analysis: Mapping[str, Any]

    def make_planned(self, model: nn.Module, args: Any, kwargs: Any) -> nn.Module:
        """The model with a plan for some inputs; the model itself where it fits without."""
        positional = () if args is None else args
        # Of what surrounds a call only what the options say is part of the step.
        analysis = run_apart(lambda: analyze(model, positional, kwargs, **self.analysis))
        budget = self.limits.get("budget")
        if budget is not None and analysis.peak_bytes <= resolve_bytes(budget):
            return model
        return apply(model, plan(analysis, **self.limits, **self.planning))

    def plan_step(self, model: nn.Module, args: Any, kwargs: Any) -> nn.Module:
        """The same for a step that runs now, under the autocast that it runs under."""
        analysis = {"autocast": find_autocast((args, kwargs)), **self.analysis}
        return replace(self, analysis=analysis).make_planned(model, args, kwargs)


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
    budget: str | float | None = None,
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
        return functools.partial(plan_lazily, make_planned=choices.plan_step)
    if args is None and kwargs is None:
        return plan_lazily(model, choices.plan_step)
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
