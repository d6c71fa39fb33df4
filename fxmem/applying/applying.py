"""A plan applied to a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from fxmem.analysis import Analysis
from fxmem.analyzing import analyze_model
from fxmem.applying.checkpointing import build_module
from fxmem.applying.lazy import plans_itself, release_model
from fxmem.applying.module import PlannedModule
from fxmem.applying.wrapping import find_original, unwrap_modules, wrap_modules
from fxmem.errors import UsageError
from fxmem.planning.describe import check_fingerprint
from fxmem.planning.plan import MODULES, Plan
from fxmem.tracing.description import describe_model, find_difference, recall_model


def unapply(model: nn.Module) -> nn.Module:
    """Gives back the model that a plan was applied to: :func:`fxmem.unapply`."""
    if isinstance(model, PlannedModule):
        return model._fxmem_original
    original = model if find_original(model) is None else unwrap_modules(model)
    if plans_itself(original):
        release_model(original)
    elif original is model:
        raise UsageError(
            f"no plan was applied to this {type(model).__name__}", hint="it is as it was"
        )
    return original


def apply(
    model: nn.Module, plan: Plan, args: Any = None, kwargs: Mapping[str, Any] | None = None
) -> nn.Module:
    """Applies a plan: :func:`fxmem.apply`, whose arguments these are."""
    if isinstance(model, PlannedModule) or find_original(model) is not None:
        raise UsageError("a plan was applied to this model", hint="fxmem.unapply it first")
    if plan.style == MODULES:
        if args is not None or kwargs is not None:
            _trace(model, plan, args, kwargs)
        wrapped = wrap_modules(model, plan.segments)
        if not hasattr(model, "plan"):
            vars(wrapped)["plan"] = replace(plan, fx_graph=None)
        return wrapped
    graph = plan.fx_graph
    if graph is None or args is not None or kwargs is not None:
        if args is None and kwargs is None:
            raise UsageError(
                "a plan without the graph that it was made on, as from a file, needs inputs to"
                " trace the model with",
                hint="fxmem.apply(model, plan, args)",
            )
        analysis = _trace(model, plan, args, kwargs)
        if analysis.frontend != "fx":
            raise UsageError(
                f"no plan can be applied to this model: {analysis.setup.frontend_reason}",
                hint="make the plan with style='modules'",
            )
        graph = analysis.fx_graph
    else:
        _check_model(model, graph)
    planned = build_module(
        model,
        graph,
        plan.segments,
        plan.inplace,
        mode=plan.mode,
        size_hint=plan.size_hint,
    )
    planned._fxmem_remember(replace(plan, fx_graph=None))
    return planned


def _check_model(model: nn.Module, graph: Any) -> None:
    described = recall_model(graph)
    name = "" if described is None else find_difference(described, describe_model(model))
    if name:
        raise UsageError(
            f"the plan was made for another model: {name} differs",
            hint="make it anew, or have the model traced again: fxmem.apply(model, plan, args)",
        )


def _trace(model: nn.Module, plan: Plan, args: Any, kwargs: Mapping[str, Any] | None) -> Analysis:
    """The model as the plan sees it.

    Raises:
        UsageError: It is not the plan's.
    """
    analysis = analyze_model(
        model,
        () if args is None else args,
        kwargs,
        mode=plan.mode,
        device="cpu",
        size_hint=plan.size_hint,
    )
    check_fingerprint(plan, analysis.graph, "fxmem.plan")
    return analysis
