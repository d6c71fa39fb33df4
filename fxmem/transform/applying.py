"""A plan applied to a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fxmem.api import analyze
from fxmem.errors import UsageError
from fxmem.planning.describe import fingerprint_graph
from fxmem.planning.plan import Plan
from fxmem.transform.checkpointing import build_module
from fxmem.transform.module import PlannedModule


def unapply(model: nn.Module) -> nn.Module:
    """The model that a plan was applied to, with the parameters as they are now.

    Args:
        model: From :func:`apply`.

    Raises:
        UsageError: No plan was applied to it.
    """
    if not isinstance(model, PlannedModule):
        raise UsageError(
            f"no plan was applied to this {type(model).__name__}", hint="it is as it was"
        )
    return model.original


def apply(
    model: nn.Module, plan: Plan, args: Any = None, kwargs: Mapping[str, Any] | None = None
) -> PlannedModule:
    """The model with a plan: it computes the same, bit for bit, in less memory.

    A plan of a training step is for calls in training, one of inference for calls in ``eval()``
    without gradients; in others the model's own ``forward`` runs.

    Args:
        model: The model that was analysed, or another of its class.
        plan: From :func:`fxmem.plan`.
        args: Inputs as for :func:`fxmem.analyze`, where the plan comes from a file: the model is
            traced with them again.
        kwargs: Keyword inputs, likewise.

    Returns:
        A module with the same parameters, buffers and names in its ``state_dict``.

    Raises:
        UsageError: The plan is not this model's, or is from a file and no inputs were given; or
            the model's graph cannot be run.
    """
    graph = plan.fx_graph
    if graph is None:
        if args is None and kwargs is None:
            raise UsageError(
                "a plan without the graph that it was made on, as from a file, needs inputs to"
                " trace the model with",
                hint="fxmem.apply(model, plan, args)",
            )
        analysis = analyze(
            model, () if args is None else args, kwargs, mode=plan.mode, device="cpu"
        )
        if fingerprint_graph(analysis.graph) != plan.fingerprint:
            raise UsageError(
                "the plan was made for another model or other inputs",
                hint="make it anew with fxmem.plan",
            )
        if analysis.frontend != "fx":
            raise UsageError(
                f"no plan can be applied to this model: {analysis.setup.frontend_reason}",
                hint="write checkpoints into its code: fxmem plan --diff",
            )
        graph = analysis.fx_graph
    return build_module(model, graph, plan.segments, plan.inplace, mode=plan.mode)
