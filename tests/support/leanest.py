"""Models with the leanest plan of a quick search, for tests of plans and not of the search."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from torch import nn

import fxmem
from fxmem.applying.applying import GraphForward
from fxmem.applying.codegen import lay_over_graph
from fxmem.applying.planned_model import make_planned
from fxmem.applying.size_ranges import find_size_ranges
from fxmem.planning import planner


def plan_leanest(
    model: nn.Module, args: Any, kwargs: Any = None, *, style: str = "graph", **options: Any
) -> fxmem.Plan:
    """Plans for the least memory on the CPU; there are segments."""
    analysis = fxmem.analyze(model, args, kwargs, device="cpu", **options)
    strategies = ("schedules" if style == "graph" else "modules", None)
    with patch.object(planner, "_WORTH", 0.0):  # of a small model nothing is worth its time
        fronts = (fxmem.pareto(analysis, style=style, strategy=strategy) for strategy in strategies)
        return next(front[-1] for front in fronts if front[-1].segments)


def apply_leanest(model: nn.Module, args: Any, kwargs: Any = None, **options: Any) -> Any:
    """The model with that plan."""
    return fxmem.apply(model, plan_leanest(model, args, kwargs, **options))


def read_code(planned: Any) -> str:
    """The code of a planned model's graph."""
    code: str = planned._fxmem_forward.code
    return code


def build_module(
    model: nn.Module, graph: Any, segments: Any = (), inplace: Any = (), mode: str = "train"
) -> Any:
    """The model with changes to a graph that was traced, in training with those in place too."""
    plan = fxmem.Plan("", 0, 0, mode=mode)
    ranges = find_size_ranges(model, graph, mode, None)
    planned = lay_over_graph(graph, model, segments, inplace)
    return make_planned(model, GraphForward(model, planned, plan, ranges))
