"""Plans of a model's graph: the traced code runs in the place of ``forward``, behind guards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._C._functorch import peek_interpreter_stack

from fxmem.applying.codegen import SegmentCodeGen
from fxmem.applying.guard import AttributeGuard, InputGuard, Values
from fxmem.applying.runtime import NO_TRANSFORMS, warn_caller
from fxmem.applying.size_ranges import SizeRange
from fxmem.planning.plan import Plan


class GraphForward:
    """The graph of a model's forward, which runs with the model's own modules and tensors.

    The model's own ``forward`` runs in the mode that the plan is not for and, with a
    :class:`fxmem.FxmemWarning`, in calls that differ from the traced one:
    :mod:`fxmem.applying.guard` has what is compared.

    Attributes:
        plan: The plan, where :func:`fxmem.apply` was given one.
        calls: The number of calls that ran by it.
        code: That of the graph.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: fx.Graph,
        mode: str = "train",
        ranges: Sequence[SizeRange] = (),
        plan: Plan | None = None,
        values: Values | None = None,
    ) -> None:
        self.plan, self.calls = plan, 0
        self._model, self._graph, self._mode, self._ranges = model, graph, mode, ranges
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
        return GraphForward, (self._model, graph, self._mode, self._ranges, self.plan, values)

    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph, or the forward given where a call is not what it was traced for."""
        values = self._choose_values(args, kwargs)
        return forward(*args, **kwargs) if values is None else self._run(self._model, *values)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _choose_values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """Lists what the graph takes; None where the model's own forward runs."""
        is_train = self._mode == "train"
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
