"""Models with the leanest plan of a quick search, for tests of plans and not of the search."""

from __future__ import annotations

from typing import Any

from torch import nn

import fxmem


def plan_leanest(
    model: nn.Module, args: Any, kwargs: Any = None, *, style: str = "graph", **options: Any
) -> fxmem.Plan:
    """Plans for the least memory on the CPU; there are segments."""
    analysis = fxmem.analyze(model, args, kwargs, device="cpu", **options)
    strategies = ("schedules" if style == "graph" else "modules", None)
    plans = (fxmem.pareto(analysis, style=style, strategy=strategy)[-1] for strategy in strategies)
    return next(plan for plan in plans if plan.segments)


def apply_leanest(model: nn.Module, args: Any, kwargs: Any = None, **options: Any) -> Any:
    """The model with that plan."""
    return fxmem.apply(model, plan_leanest(model, args, kwargs, **options))
