"""A plan applied to a model; with a plan of its graph, the traced code runs as its forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._C._functorch import peek_interpreter_stack
from torch.utils._pytree import tree_leaves

from fxmem.analysis import Analysis
from fxmem.analyzing import analyze
from fxmem.applying.codegen import SegmentCodeGen, lay_over_graph
from fxmem.applying.guard import AttributeGuard, InputGuard, Values
from fxmem.applying.planned_model import find_original, make_planned, wrap_modules
from fxmem.applying.runtime import NO_TRANSFORMS, warn_caller
from fxmem.applying.size_ranges import SizeRange, find_size_ranges
from fxmem.errors import UsageError
from fxmem.planning.plan import MODULES, Plan, strip_plan
from fxmem.tracing.conditions import read_autocast_on
from fxmem.tracing.modules import describe_model, find_difference, recall_model


def apply(
    model: nn.Module, plan: Plan, args: Any = None, kwargs: Mapping[str, Any] | None = None
) -> nn.Module:
    """Applies a plan: the returned model computes the same, bit for bit, in less memory.

    A plan of a training step is for calls in training, a plan of inference for calls in
    ``eval()`` without gradients; other calls run the model's own ``forward``. So do, with a
    :class:`fxmem.FxmemWarning` that names the cause, calls that differ from what the graph of a
    plan of style ``"graph"`` was traced for. Which sizes of inputs may differ is tried here: the
    forward is traced with others, once for all plans of an analysis.

    Args:
        model: The model that was analysed, or another of its class.
        plan: From :func:`fxmem.plan`.
        args: Inputs as for :func:`fxmem.analyze`, where the plan comes from a file: the model is
            traced with them again. A plan of style ``"modules"`` needs none, and is checked
            against what is traced with them.
        kwargs: Keyword inputs, of the same kinds.

    Returns:
        An instance of the model's own class, with the very same attributes.

    Raises:
        UsageError: The plan is not this model's, or is from a file and no inputs were given; or
            the model's graph cannot be run.
    """
    if find_original(model) is not None:
        raise UsageError("a plan was applied to this model", hint="fxmem.unapply it first")
    has_inputs = args is not None or kwargs is not None
    if plan.style == MODULES:
        if has_inputs:
            _trace(model, plan, args, kwargs)
        return wrap_modules(model, strip_plan(plan))
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
        described = recall_model(graph)
        name = "" if described is None else find_difference(described, describe_model(model))
        if name:
            raise UsageError(
                f"the plan was made for another model: {name} differs",
                hint="make a new one, or trace the model again: fxmem.apply(model, plan, args)",
            )
    ranges = find_size_ranges(model, graph, plan.mode, plan.size_hint)
    planned = lay_over_graph(graph, model, plan.segments, plan.applied_inplace)
    return make_planned(model, GraphForward(model, planned, strip_plan(plan), ranges))


def find_autocast(inputs: Any) -> torch.dtype | None:
    """Finds what a call is autocast to on the device of its tensors; None for nothing.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     find_autocast([torch.ones(1)])
    torch.bfloat16
    """
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    return read_autocast_on("cuda" if any(tensor.is_cuda for tensor in tensors) else "cpu")


def _trace(model: nn.Module, plan: Plan, args: Any, kwargs: Mapping[str, Any] | None) -> Analysis:
    """Analyses the model for the inputs, and checks that the plan is for both."""
    given = () if args is None else args
    options: dict[str, Any] = {"mode": plan.mode, "size_hint": plan.size_hint}
    options["autocast"] = find_autocast((given, kwargs))
    analysis = analyze(model, given, kwargs, device="cpu", **options)
    plan.check(analysis.graph, "fxmem.plan")
    return analysis


class GraphForward:
    """The graph of a model's forward, which runs with the model's own modules and tensors.

    The model's own ``forward`` runs in the mode that the plan is not for and, with a
    :class:`fxmem.FxmemWarning`, in calls that differ from the traced one:
    :mod:`fxmem.applying.guard` has what is compared.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: fx.Graph,
        plan: Plan,
        ranges: Sequence[SizeRange] = (),
        values: Values | None = None,
    ) -> None:
        self.plan, self.calls = plan, 0
        self._model, self._graph, self._ranges = model, graph, ranges
        self._inputs = InputGuard(model, graph, ranges)
        self._attributes = AttributeGuard(model, graph, values)
        graph.set_codegen(SegmentCodeGen())  # which a pickled graph comes without
        empty = fx.Graph()
        empty.output(None)
        module = fx.GraphModule({}, empty, class_name=type(model).__name__)
        module.graph = graph
        self.code: str = module.code
        self._run: Callable[..., Any] = type(module).forward

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the graph does not know the module that it belongs to.
        graph, values = copy.deepcopy(self._graph), self._attributes.values
        return GraphForward, (self._model, graph, self.plan, self._ranges, values)

    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph, or the forward given where a call is not what it was traced for."""
        values = self._choose_values(args, kwargs)
        return forward(*args, **kwargs) if values is None else self._run(self._model, *values)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _choose_values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """Lists what the graph takes; None where the model's own forward runs."""
        is_train = self.plan.mode == "train"
        if self._model.training is not is_train or torch.is_grad_enabled() is not is_train:
            return None
        if peek_interpreter_stack() is not None:
            warn_caller(NO_TRANSFORMS)
            return None
        values: list[Any] = []
        difference = self._attributes.find_difference()
        if not difference:
            difference, values = self._inputs.compare(args, kwargs)
        if difference:
            warn_caller(f"{difference}: this step runs without the plan")
            return None
        self.calls += 1
        return values
