"""Segments of a plan laid over a graph module: a pass of torch.fx."""

from __future__ import annotations

from torch import fx
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fxmem.passes.annotation import lay_plan
from fxmem.planning.plan import Plan


class CheckpointPass(PassBase):
    """Has backward compute the segments of a plan again.

    The pass lays segments over ``analysis.graph_module``, or over what another pass made of it, and
    guards nothing: :func:`fxmem.apply` has the guards.

    Args:
        plan: A plan of style ``"graph"``.

    >>> import fxmem, torch
    >>> layers = [torch.nn.Linear(8, 64), *[torch.nn.Tanh() for _ in range(8)]]
    >>> model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 1))
    >>> analysis = fxmem.analyze(model, "64x8", device="cpu")
    >>> plan = fxmem.pareto(analysis, style="graph", time_limit_s=1)[-1]
    >>> result = CheckpointPass(plan)(analysis.graph_module)
    >>> result.modified, "segment_1" in result.graph_module.code
    (True, True)
    >>> x = torch.randn(64, 8)
    >>> torch.equal(result.graph_module(x), model(x))
    True
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Lays the segments over a copy of the graph."""
        made = lay_plan(graph_module, segments=self._plan.segments)
        return PassResult(made, bool(self._plan.segments))
