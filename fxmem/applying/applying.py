"""A plan applied to a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn

from fxmem.analysis import Analysis
from fxmem.analyzing import analyze_model
from fxmem.applying.laying import lay_over_graph
from fxmem.applying.lazy import find_lazy
from fxmem.applying.module import PlannedModule
from fxmem.applying.modules import find_original, wrap_modules
from fxmem.applying.sizes import find_size_ranges
from fxmem.applying.surroundings import find_autocast
from fxmem.errors import UsageError
from fxmem.planning.plan import MODULES, InplaceChange, Plan, Segment, check_fingerprint
from fxmem.tracing.modules import describe_model, find_difference, recall_model


def unapply(model: nn.Module) -> nn.Module:
    """Gives back the model that a plan was applied to: :func:`fxmem.unapply`."""
    if isinstance(model, PlannedModule):
        return model.original
    original = find_original(model) or model
    lazy = find_lazy(original)
    if lazy is not None:
        lazy.release()
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
    has_inputs = args is not None or kwargs is not None
    if plan.style == MODULES:
        if has_inputs:
            _trace(model, plan, args, kwargs)
        return wrap_modules(model, plan.segments, replace(plan, fx_graph=None))
    graph = plan.fx_graph
    if has_inputs:
        analysis = _trace(model, plan, args, kwargs)
        if analysis.frontend != "fx":
            raise UsageError(
                f"no plan can be applied to this model: {analysis.setup.frontend_reason}",
                hint="make the plan with style='modules'",
            )
        graph = analysis.fx_graph
    elif graph is None:
        raise UsageError(
            "a plan without the graph that it was made on, as from a file, needs inputs to"
            " trace the model with",
            hint="fxmem.apply(model, plan, args)",
        )
    else:
        _check_model(model, graph)
    options: dict[str, Any] = {"mode": plan.mode, "size_hint": plan.size_hint}
    bare = replace(plan, fx_graph=None)
    return build_module(model, graph, plan.segments, plan.inplace, plan=bare, **options)


def build_module(
    model: nn.Module,
    graph: fx.Graph,
    segments: Sequence[Segment] = (),
    inplace: Sequence[InplaceChange] = (),
    *,
    mode: str = "train",
    size_hint: int | None = None,
    plan: Plan | None = None,
) -> PlannedModule:
    """Makes the module that runs a traced graph with changes.

    Args:
        model: Whose submodules, parameters and buffers the graph calls.
        graph: As it was traced.
        segments: What backward computes again.
        inplace: What is computed in place.
        mode: The calls that run the graph: ``"train"`` or ``"infer"``.
        size_hint: How many elements are found where that depends on data.
        plan: The plan that the changes are of.
    """
    ranges = find_size_ranges(model, graph, mode, size_hint)
    return PlannedModule(model, lay_over_graph(graph, model, segments, inplace), mode, ranges, plan)


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
    given = () if args is None else args
    options: dict[str, Any] = {"mode": plan.mode, "size_hint": plan.size_hint}
    autocast = find_autocast((given, kwargs))  # that of the caller
    analysis = analyze_model(model, given, kwargs, device="cpu", autocast=autocast, **options)
    check_fingerprint(plan, analysis.graph, "fxmem.plan")
    return analysis
