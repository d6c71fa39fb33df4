"""The nodes of a traced model: what each is called, what it takes, and its place in the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
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
    list_ties,
    make_specs,
    read_context,
    read_settings,
    run_within,
)
from fxmem.tracing.fxgraph import (
    CONSTANT,
    NODE,
    WATCHED,
    GraphBuilder,
    iterate_tensors,
)
from fxmem.tracing.modules import sees_arguments, sees_result
from fxmem.tracing.source import find_source

ACCESSORS = (getattr, setattr, delattr)


@dataclass(frozen=True, slots=True)
class TracedNode:
    """A node as the tracer sees it; the recording adds bytes and FLOPs.

    Attributes are those of :class:`fxmem.graph.Node`.
    """

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


@dataclass(frozen=True, slots=True)
class Call:
    """What runs as one node.

    Attributes:
        op: As of a node of an FX graph.
        target: Likewise.
        label: What the target is called for a reader.
        fqn: The module that is called, or in whose code the call is.
        function: What is really called.
        args: What it is called with.
        kwargs: Likewise, by name.
    """

    op: str
    target: Any
    label: str
    fqn: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        """How a node of it is called where it is the first of that name."""
        return self.fqn if self.op == "call_module" else f"{self.fqn}.{self.label}".strip(".")


class NodeLog:
    """Writes down nodes, and builds the FX graph of those of forward.

    Args:
        model: The model, on fake tensors.

    Attributes:
        nodes: What was traced so far.
        builder: Builds the graph.
    """

    def __init__(self, model: nn.Module) -> None:
        self.nodes: list[TracedNode] = []
        self.builder = GraphBuilder(model)
        self._model = model
        self._occurrences: dict[str, int] = {}
        self._context, self._settings = read_context(), read_settings()
        self._traced_in: TraceContext | None = None

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Adds the placeholders; the graph is for the context of the caller."""
        bound = [*bind_arguments(self._model, args, kwargs)]
        for name, value in bound:
            self._add_placeholder(name, value)
        self._context, self._settings = read_context(), read_settings()
        tensors: list[torch.Tensor] = []
        describe_structure([value for _, value in bound], tensors)
        parameters = self._model.named_parameters(remove_duplicate=False)
        self._traced_in = TraceContext(
            self._context.autocast,
            list_ties(tensors),
            training=frozenset(
                name  # of each module, also of one that has several
                for name, module in self._model.named_modules(remove_duplicate=False)
                if module.training
            ),
            frozen=frozenset(n for n, parameter in parameters if not parameter.requires_grad),
            inputs=make_specs(args, kwargs),
        )

    def end(self, output: Any) -> None:
        """Adds the output."""
        self.builder.set_output(output)
        for node in self.builder.graph.find_nodes(op="output"):
            node.meta[CONTEXT] = self._traced_in

    def add(self, call: Call, result: Any, phase: Phase) -> None:
        """Adds the node of a call that has returned, with its result."""
        name = self._make_name(call.name)
        args = (call.args[0], call.label, *call.args[1:]) if _is_access(call) else call.args
        inputs = self.builder.find_inputs((args, call.kwargs))
        op, fx_node = call.op, None
        if phase is Phase.FORWARD:
            op, target = self._keep_context(call, result)
            fx_node = self.builder.add_call(op, target, args, call.kwargs, name)
            fx_node.meta[NODE] = name
            if "from_node" in traceback.get_current_meta():  # an Interpreter says which it runs
                fx_node.meta["from_node"] = traceback.get_current_meta()["from_node"]
            if op == "call_module":
                module = self._model.get_submodule(target)
                fx_node.meta[WATCHED] = (sees_arguments(module), sees_result(module))
        index = len(self.nodes)
        self.builder.tag_result(result, index, fx_node)
        self.nodes.append(
            TracedNode(
                index=index,
                name=name,
                fqn=call.fqn,
                op=op,
                target=call.label,
                phase=phase,
                shape=_find_shape(result),
                dtype=_find_dtype(result),
                source=find_source(),
                inputs=inputs,
            )
        )

    def _add_placeholder(self, name: str, value: Any) -> None:
        index, fx_node = len(self.nodes), self.builder.add_placeholder(name)
        self.builder.tag_result(value, index, fx_node)
        dtype = _find_dtype(value)
        if dtype is None:
            fx_node.meta[CONSTANT] = value
            return
        fx_node.meta[SIGNATURE] = describe_value(value)
        self.nodes.append(
            TracedNode(
                index=index,
                name=self._make_name(name),
                fqn="",
                op="placeholder",
                target=name,
                phase=Phase.FORWARD,
                shape=_find_shape(value),
                dtype=dtype,
                source=None,
                inputs=(),
            )
        )

    def _make_name(self, candidate: str) -> str:
        seen = self._occurrences.get(candidate, 0)
        self._occurrences[candidate] = seen + 1
        return f"{candidate}_{seen}" if seen else candidate

    def _keep_context(self, call: Call, result: Any) -> tuple[str, Any]:
        """What the graph calls so that it runs in the context in which the code has it."""
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
        is_fixed = is_module or _is_access(call)
        within = None if is_fixed else run_within(call.function, outer, inner)
        if within is None:
            kind = "autocast" if outer.autocast != inner.autocast else "gradients"
            self.builder.give_up(f"the code itself turns {kind} on or off")
            return call.op, call.target
        return "call_function", within


def _is_access(call: Call) -> bool:
    """Tells whether it reads or writes an attribute of a tensor."""
    return call.target in ACCESSORS


def _find_shape(value: Any) -> tuple[int, ...] | None:
    """That of the first tensor in a value."""
    first = next(iterate_tensors(value), None)
    return None if first is None else tuple(map(int, first.shape))


def _find_dtype(value: Any) -> str | None:
    first = next(iterate_tensors(value), None)
    return None if first is None else strip_torch(first.dtype)
