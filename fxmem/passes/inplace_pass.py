"""In-place changes of a plan laid over a graph module: a pass of torch.fx."""

from __future__ import annotations

from torch import fx
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fxmem.passes.annotation import lay_plan
from fxmem.planning.plan import Plan


class InplacePass(PassBase):
    """Has operations overwrite what a plan says that nobody needs any more.

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

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Lays the changes over a copy of the graph."""
        inplace = self._plan.applied_inplace
        return PassResult(lay_plan(graph_module, inplace=inplace), bool(inplace))
