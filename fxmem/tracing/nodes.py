"""Nodes of a traced model: names, sources, inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import fx, nn

from fxmem.fakes.containers import iterate_paths, iterate_tensors
from fxmem.graph import Phase, SourceLocation
from fxmem.source import find_source
from fxmem.specs import strip_torch
from fxmem.tracing.calls import bind_arguments

ACCESSORS = (getattr, setattr, delattr)
_ORIGIN = "_fxmem_origin"
_logs = itertools.count()


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


@dataclass(frozen=True, slots=True)
class Origin:
    """The node that a tensor comes from, and the way to it in that node's result.

    Kept as an attribute of the tensor object: it goes when the tensor goes.
    """

    log: int  # number of the log that has the node
    node: int  # index of the traced node
    fx_node: fx.Node | None  # None where no graph is built
    path: tuple[Any, ...] = ()  # keys and indices into the node's result


def read_origin(tensor: torch.Tensor) -> Origin | None:
    """Reads the origin of a tensor in whichever log has it; None for parameters and strangers."""
    return tensor.__dict__.get(_ORIGIN)


class GraphWriter(Protocol):
    """Builds an FX graph of the nodes that a log names."""

    def add_placeholder(self, name: str, value: Any) -> fx.Node: ...

    def add(self, call: Call, args: tuple[Any, ...], result: Any, name: str) -> fx.Node: ...


class NodeLog:
    """Names nodes as they run, and marks the tensors that they make.

    Args:
        model: The model, whose parameters and buffers no node makes.
        writer: Builds the FX graph of forward, where one is wanted.
    """

    def __init__(self, model: nn.Module, writer: GraphWriter | None = None) -> None:
        self.nodes: list[TracedNode] = []
        self._model = model
        self._writer = writer
        self._number = next(_logs)
        self._own: set[int] = set()
        self._occurrences: dict[str, int] = {}
        self.add_model(model)

    def add_model(self, model: nn.Module) -> None:
        """Adds a model whose parameters and buffers no node makes, though one may return them."""
        self._own |= {id(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Adds a node for each input of the model that holds a tensor."""
        for name, value in bind_arguments(self._model, args, kwargs):
            fx_node = None if self._writer is None else self._writer.add_placeholder(name, value)
            if next(iterate_tensors(value), None) is not None:
                node_name = self._make_name(name)
                self._append(value, fx_node, node_name, "", "placeholder", name)

    def add(self, call: Call, result: Any, phase: Phase) -> None:
        """Adds the node of a call that has returned, with its result."""
        name = self._make_name(call.name)
        is_access = call.target in ACCESSORS
        args = (call.args[0], call.label, *call.args[1:]) if is_access else call.args
        origins = map(self.find_origin, iterate_tensors((args, call.kwargs)))
        inputs = tuple(dict.fromkeys(origin.node for origin in origins if origin))
        op, fx_node = call.op, None
        if self._writer is not None and phase is Phase.FORWARD:
            fx_node = self._writer.add(call, args, result, name)
            op = fx_node.op
        source = find_source()
        self._append(result, fx_node, name, call.fqn, op, call.label, phase, source, inputs)

    def add_compiled(
        self, fqn: str, target: str, source: SourceLocation | None, phase: Phase
    ) -> TracedNode:
        """Adds a node of compiled code."""
        op = "call_module" if target[:1].isupper() else "call_function"
        name = self._make_name(fqn if op == "call_module" else f"{fqn}.{target}".strip("."))
        self._append(None, None, name, fqn, op, target, phase, source)
        return self.nodes[-1]

    def repeat(self, nodes: Iterable[TracedNode]) -> None:
        """Adds nodes whose calls were left out, each by a name of its own."""
        self.nodes += [replace(node, name=self._make_name(node.first_name)) for node in nodes]

    def find_origin(self, tensor: torch.Tensor) -> Origin | None:
        """Finds the origin of a tensor among the nodes; None for parameters and strangers."""
        origin = read_origin(tensor)
        return origin if origin is not None and origin.log == self._number else None

    def tag_result(self, result: Any, node: int, fx_node: fx.Node | None = None) -> None:
        """Marks the tensors in a node's result as coming from it."""
        for path, tensor in iterate_paths(result):
            if id(tensor) not in self._own:
                tensor.__dict__[_ORIGIN] = Origin(self._number, node, fx_node, path)

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
        self.tag_result(result, index, fx_node)
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
