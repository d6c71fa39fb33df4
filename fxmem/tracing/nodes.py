"""Nodes of a traced model: names, sources, inputs, and their places in the FX graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.fx import traceback

from fxmem.graph import Phase, SourceLocation
from fxmem.specs import strip_torch
from fxmem.tracing.calls import bind_arguments
from fxmem.tracing.conditions import (
    CONTEXT,
    SIGNATURE,
    TraceContext,
    describe_structure,
    describe_value,
    make_specs,
    read_context,
    read_settings,
    run_within,
)
from fxmem.tracing.fxgraph import CONSTANT, ENTERED, NODE, WATCHED, GraphBuilder, iterate_tensors
from fxmem.tracing.modules import find_watched
from fxmem.tracing.source import find_source

ACCESSORS = (getattr, setattr, delattr)


@dataclass(frozen=True, slots=True)
class TracedNode:
    """A node as the tracer sees it: :class:`fxmem.graph.Node` without bytes and FLOPs."""

    index: int
    name: str
    fqn: str
    op: str
    target: str
    phase: Phase
    shape: tuple[int, ...] | None
    dtype: str | None
    source: SourceLocation | None
    inputs: tuple[int, ...]

    @property
    def first_name(self) -> str:
        """The name of the first node that calls the same."""
        return self.fqn if self.op == "call_module" else f"{self.fqn}.{self.target}".strip(".")


@dataclass(frozen=True, slots=True)
class Call:
    """A call that runs as one node."""

    op: str  # with the target as of a node of an FX graph
    target: Any
    label: str  # the name of the target for a reader
    fqn: str  # the module that is called, or in whose code the call is
    function: Callable[..., Any]  # runs
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the first node that calls it."""
        return self.fqn if self.op == "call_module" else f"{self.fqn}.{self.label}".strip(".")


class NodeLog:
    """Writes down nodes, and builds the FX graph of those of forward where one is wanted."""

    def __init__(self, model: nn.Module, *, builds_graph: bool = True) -> None:
        self.nodes: list[TracedNode] = []
        self.builder = GraphBuilder(model)
        self._model = model
        self._builds_graph = builds_graph
        self._occurrences: dict[str, int] = {}
        self._context, self._settings = read_context(), read_settings()
        self._traced_in: TraceContext | None = None

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Adds the placeholders; the graph is for the context of the caller."""
        bound = [*bind_arguments(self._model, args, kwargs)]
        for name, value in bound:
            fx_node = self.builder.graph.placeholder(name)
            if next(iterate_tensors(value), None) is None:
                fx_node.meta[CONSTANT] = value
                continue
            fx_node.meta[SIGNATURE] = describe_value(value)
            self._append(value, fx_node, self._make_name(name), "", "placeholder", name)
        self._context, self._settings = read_context(), read_settings()
        tensors: list[torch.Tensor] = []
        describe_structure([value for _, value in bound], tensors)
        known: dict[int, int] = {}
        firsts = [known.setdefault(id(tensor), at) for at, tensor in enumerate(tensors)]
        parameters = self._model.named_parameters(remove_duplicate=False)
        modules = self._model.named_modules(remove_duplicate=False)  # by all of their names
        self._traced_in = TraceContext(
            self._context.autocast,
            tuple((at, first) for at, first in enumerate(firsts) if at != first),
            training=frozenset(name for name, module in modules if module.training),
            frozen=frozenset(n for n, parameter in parameters if not parameter.requires_grad),
            inputs=make_specs(args, kwargs),
        )

    def end(self, output: Any, entered: frozenset[str]) -> None:
        """Adds the output; the modules that were entered are no nodes."""
        node = self.builder.set_output(output)
        node.meta[CONTEXT], node.meta[ENTERED] = self._traced_in, entered

    def add(self, call: Call, result: Any, phase: Phase) -> None:
        """Adds the node of a call that has returned, with its result."""
        name = self._make_name(call.name)
        is_access = call.target in ACCESSORS
        args = (call.args[0], call.label, *call.args[1:]) if is_access else call.args
        origins = map(self.builder.find_origin, iterate_tensors((args, call.kwargs)))
        inputs = tuple(dict.fromkeys(origin.node for origin in origins if origin))
        op, fx_node = call.op, None
        if phase is Phase.FORWARD and self._builds_graph:
            op, target = self._keep_context(call, result)
            fx_node = self.builder.add_call(op, target, args, call.kwargs, name)
            fx_node.meta[NODE] = name
            if "from_node" in traceback.get_current_meta():  # an Interpreter says which it runs
                fx_node.meta["from_node"] = traceback.get_current_meta()["from_node"]
            if op == "call_module":
                module = self._model.get_submodule(target)
                fx_node.meta[WATCHED] = find_watched(module)
        source = find_source()
        self._append(result, fx_node, name, call.fqn, op, call.label, phase, source, inputs)

    def repeat(self, nodes: Iterable[TracedNode]) -> None:
        """Adds nodes whose calls were left out, each by a name of its own."""
        self.nodes += [replace(node, name=self._make_name(node.first_name)) for node in nodes]

    def _append(
        self,
        result: Any,
        fx_node: fx.Node | None,
        name: str,
        fqn: str,
        op: str,
        target: str,
        phase: Phase = Phase.FORWARD,
        source: SourceLocation | None = None,
        inputs: tuple[int, ...] = (),
    ) -> None:
        index = len(self.nodes)
        self.builder.tag_result(result, index, fx_node)
        first = next(iterate_tensors(result), None)
        shape = None if first is None else tuple(map(int, first.shape))
        dtype = None if first is None else strip_torch(first.dtype)
        self.nodes.append(
            TracedNode(index, name, fqn, op, target, phase, shape, dtype, source, inputs)
        )

    def _make_name(self, candidate: str) -> str:
        seen = self._occurrences.get(candidate, 0)
        self._occurrences[candidate] = seen + 1
        return f"{candidate}_{seen}" if seen else candidate

    def _keep_context(self, call: Call, result: Any) -> tuple[str, Any]:
        """Finds the op and target that run a call as the code's own context has it."""
        outer, inner = self._context, read_context()
        for name, value in read_settings().items():
            if value != self._settings[name]:
                self.builder.give_up(f"the code itself sets {name}")
        if outer == inner:
            return call.op, call.target
        is_module = call.op == "call_module"
        if outer.autocast == inner.autocast and not inner.grad:
            given = [*iterate_tensors((call.args, call.kwargs))]
            if is_module:
                given += self._model.get_submodule(call.target).parameters()
            records = any(tensor.is_floating_point() for tensor in iterate_tensors(result))
            if not records or not any(tensor.requires_grad for tensor in given):
                return call.op, call.target  # autograd would not record it anyway
        is_fixed = is_module or call.target in ACCESSORS
        within = None if is_fixed else run_within(call.function, outer, inner)
        if within is None:
            kind = "autocast" if outer.autocast != inner.autocast else "gradients"
            self.builder.give_up(f"the code itself turns {kind} on or off")
            return call.op, call.target
        return "call_function", within
