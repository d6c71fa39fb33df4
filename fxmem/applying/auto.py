"""A model with a plan in one line: analysed, planned and applied, or so at its first step."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fxmem.analyzing import analyze_model
from fxmem.applying.applying import apply
from fxmem.applying.lazy import plan_lazily
from fxmem.applying.surroundings import find_autocast
from fxmem.errors import UsageError
from fxmem.gpus import find_gpu
from fxmem.planning.planner import plan
from fxmem.units import resolve_bytes


@dataclass(frozen=True, slots=True)
class _Choices:
    """What :func:`auto` was asked for."""

    limits: Mapping[str, Any]
    planning: Mapping[str, Any]
    analysis: Mapping[str, Any]

    def make_planned(self, model: nn.Module, args: Any, kwargs: Any) -> nn.Module:
        """The model with a plan for some inputs; the model itself where it fits without."""
        positional = () if args is None else args
        analysis = analyze_model(model, positional, kwargs, **self.analysis)
        budget = self.limits.get("budget")
        if budget is not None and analysis.peak_bytes <= resolve_bytes(budget):
            return model
        return apply(model, plan(analysis, **self.limits, **self.planning))

    def plan_step(self, model: nn.Module, args: Any, kwargs: Any) -> nn.Module:
        """The same for a step that runs now, under the autocast that it runs under."""
        analysis = {"autocast": find_autocast((args, kwargs)), **self.analysis}
        return replace(self, analysis=analysis).make_planned(model, args, kwargs)


def auto(
    model: Any = None,
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: str | float | None = None,
    max_overhead: float | None = None,
    max_overhead_flops: float | None = None,
    style: str | None = None,
    time_limit_s: float | None = None,
    device: str = "cuda",
    gpu: str | None = None,
    **options: Any,
) -> Any:
    """Makes a training step keep a limit: :func:`fxmem.auto`, whose arguments these are."""
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
