"""Plans laid over a graph module: passes of torch.fx."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fxmem.applying.codegen import SEEN, SEGMENTS, lay_over_graph
from fxmem.planning.plan import InplaceChange, Plan, Segment
from fxmem.training.annotation import META, NodeMemory


class _PlanPass(PassBase):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan


class CheckpointPass(_PlanPass):
    """Makes backward compute the segments of a plan again.

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

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Lays the segments over a copy of the graph."""
        made = _lay_plan(graph_module, segments=self._plan.segments)
        return PassResult(made, bool(self._plan.segments))


class InplacePass(_PlanPass):
    """Makes operations overwrite what a plan says that nobody needs any more.

    The pass changes ``analysis.graph_module``, or what another pass made of it, for calls with the
    dtypes of the analysis.

    Args:
        plan: A plan of inference.

    >>> import fxmem, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.ReLU())
    >>> analysis = fxmem.analyze(model, "64x8", device="cpu", mode="infer")
    >>> plan = fxmem.plan(analysis)
    >>> result = InplacePass(plan)(analysis.graph_module)
    >>> result.modified, "overwrite_by_module" in result.graph_module.code
    (True, True)
    """

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Lays the changes over a copy of the graph."""
        inplace = self._plan.applied_inplace
        return PassResult(_lay_plan(graph_module, inplace=inplace), bool(inplace))


def _lay_plan(
    graph_module: fx.GraphModule,
    segments: Sequence[Segment] = (),
    inplace: Sequence[InplaceChange] = (),
) -> fx.GraphModule:
    """Lays changes of a plan over a copy of a graph, and notes them in ``meta["fxmem"]``."""
    graph = lay_over_graph(graph_module.graph, graph_module, segments, inplace)
    made = fx.GraphModule(graph_module, graph, class_name=type(graph_module).__name__)
    for node in made.graph.nodes:
        node.meta[META] = replace(
            node.meta.get(META, NodeMemory()),
            segments=tuple(code.name for code in node.meta.get(SEGMENTS, ())),
            is_inplace=SEEN in node.meta,
        )
    return made
