"""Segments and in-place operations laid over a traced graph, and the code of such a graph.

The graph stays flat, as it was traced; which segments a node lies in is in its ``meta``. Each
segment becomes a function within ``forward``, of which the text is what torch.fx writes
(``torch/fx/graph.py``, ``CodeGen._gen_python_code``).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.graph import CodeGen, PythonCode, _format_target, _Namespace
from torch.fx.node import _get_qualified_name

from fxmem.applying.planned_model import find_holders
from fxmem.applying.runtime import (
    checkpoint,
    overwrite_by_function,
    overwrite_by_method,
    overwrite_by_module,
)
from fxmem.errors import UsageError
from fxmem.planning.inplace.forms import FormKind, OverwritingNode, find_overwriting, find_owners
from fxmem.planning.plan import InplaceChange, Segment

SEGMENTS = "fxmem_segments"
"""Key of a node's ``meta``: the segments it lies in, outermost first."""
SEEN = "fxmem_seen"
"""Key of a node's ``meta``, where it overwrites a value: names of the modules that made the value,
and of the modules that take it and whose hooks may keep it."""


class _SegmentCode(NamedTuple):
    """A segment, and the name of its function."""

    name: str
    segment: Segment


def lay_over_graph(
    graph: fx.Graph,
    model: nn.Module,
    segments: Sequence[Segment] = (),
    inplace: Sequence[InplaceChange] = (),
) -> fx.Graph:
    """Copies a graph with segments under checkpoints, and operations in place.

    The graph is as it was traced, or one that other changes were laid over.
    """
    copied = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = copied.output(copied.graph_copy(graph, copies))
    for traced in graph.find_nodes(op="output"):
        output.meta.update(traced.meta)
    copied.set_codegen(SegmentCodeGen())
    owners = find_owners(graph)
    names = [*dict.fromkeys(owners.values())]
    positions = {name: at for at, name in enumerate(names)}
    named = [name for change in inplace for name in (change.node, change.overwrites)]
    paths: dict[str, tuple[_SegmentCode, ...]] = {}
    prefix = "segment"  # no value's name begins so
    while any(node.name.startswith(f"{prefix}_") for node in graph.nodes):
        prefix = f"planned_{prefix}"
    for code in _iterate_codes(segments, prefix):
        segment = code.segment
        find_holders(model, segment.states)  # or tells what is not there
        named += [segment.first, segment.last]
        if positions.keys() >= {segment.first, segment.last}:
            for name in names[positions[segment.first] : positions[segment.last] + 1]:
                paths[name] = (*paths.get(name, ()), code)
    for name in named:
        if name not in positions:
            raise UsageError(
                f"the plan's node {name!r} is not in the model",
                hint="make the plan for this model and these inputs",
            )
    if segments:
        for node, copy in copies.items():
            copy.meta[SEGMENTS] = paths.get(owners.get(node, ""), ())
    for found in find_overwriting(graph, inplace):
        _overwrite(copied, copies[found.node], found)
    return copied


def _iterate_codes(segments: Sequence[Segment], prefix: str) -> Iterator[_SegmentCode]:
    for number, segment in enumerate(segments, 1):
        name = f"{prefix}_{number}"
        yield _SegmentCode(name, segment)
        yield from _iterate_codes(segment.children, name)


def _overwrite(graph: fx.Graph, node: fx.Node, found: OverwritingNode) -> None:
    """Makes a node call the in-place form of its target."""
    makers = () if found.maker is None else (str(found.maker.target),)
    consumers = tuple(dict.fromkeys(str(each.target) for each in found.consumers))
    args, kwargs, name = list(node.args), dict(node.kwargs), found.form.name
    if found.form.kind is FormKind.METHOD:
        # Functions of torch take by name what methods take by place.
        args += [kwargs.pop(key) for key in ("input", "self", "other") if key in kwargs]
        if "inplace" in kwargs or node.target is torch.nn.functional.relu:  # has the flag
            args, kwargs = args[:1], {}
        args = [name, *(args[1::-1] if found.is_second else args)]
        node.target = overwrite_by_method
    elif found.form.kind is FormKind.FUNCTION:
        args = [name, *args]
        node.target = overwrite_by_function
    else:
        consumers += (str(node.target),)
        with graph.inserting_before(node):
            args = [graph.get_attr(str(node.target)), *args, *kwargs.values()]
        kwargs = {}
        node.target = overwrite_by_module
    node.op, node.args, node.kwargs = "call_function", tuple(args), kwargs
    node.meta[SEEN] = makers, consumers


class _Text(str):
    """Written into the code as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class SegmentCodeGen(CodeGen):
    """Writes segments as functions, each called under a checkpoint."""

    def _gen_python_code(
        self, nodes: Iterable[fx.Node], root_module: str, namespace: _Namespace, **options: Any
    ) -> PythonCode:
        writer = _Writer(root_module)
        # A parameter is fetched in the function that uses it.
        body = [node for node in nodes if node.op != "get_attr"]
        code = writer.write_function("forward", body, 0, None)
        return PythonCode(f"\n\n\n{code}", writer.globals, _lineno_map=None)


class _Writer:
    """Writes functions that share their globals."""

    def __init__(self, root: str) -> None:
        self.globals: dict[str, Any] = {}
        self._root = root
        self._names: set[str] = set()

    def write_function(
        self, name: str, nodes: Sequence[fx.Node], depth: int, ends: tuple[Any, Any] | None
    ) -> str:
        """Writes a function that lies in ``depth`` segments, with its own segments inside.

        Its arguments and results are the ``ends``; ``forward`` has nodes for them.
        """
        graph, inner = fx.Graph(), []
        values: dict[fx.Node, fx.Node] = {}

        def find(node: fx.Node) -> fx.Node:
            if node not in values and node.op == "get_attr":
                values[node] = graph.node_copy(node)
            return values[node]

        for node in ends[0] if ends else ():
            values[node] = graph.placeholder(node.name)
        for path, group in itertools.groupby(nodes, lambda n: n.meta.get(SEGMENTS, ())[depth:][:1]):
            members = [*group]
            if not path:
                for node in members:
                    values[node] = copied = graph.node_copy(node, find)
                    if callable(node.target):
                        copied.target = _make_findable(node.target)
                continue
            ((function, segment),) = path
            assert function not in self._names, f"{function} is not of one piece"
            self._names.add(function)
            inputs, outputs = _find_ends(members)
            inner.append(self.write_function(function, members, depth + 1, (inputs, outputs)))
            single = len(outputs) == 1
            norms = tuple(map(self._write_module, segment.norms))
            holders = (path.rpartition(".") for path in segment.states)
            states = tuple((self._write_module(module), key) for module, _, key in holders)
            given = {"norms": norms, "states": states, "whole": segment.runs_whole}
            options = {key: value for key, value in given.items() if value}
            if not segment.random:
                options["draws"] = False
            call = graph.create_node(
                "call_function",
                checkpoint,
                (_Text(function), *map(find, inputs)),
                options,
                name=outputs[0].name if single else f"{function}_results",
            )
            for at, node in enumerate(outputs):
                values[node] = call if single else graph.create_node(
                    "call_function", operator.getitem, (call, at), name=node.name
                )  # fmt: skip
        if ends:
            results = tuple(map(find, ends[1]))
            graph.output(results[0] if len(results) == 1 else results)
        # Globals keep the names that they have in the functions written before.
        namespace = _Namespace()
        for known, value in self.globals.items():
            namespace.create_name(known, value)
        for node in graph.nodes:
            node._repr_fn = lambda n: namespace.create_name(n.name, n)
        code = graph._codegen._gen_python_code(graph.nodes, self._root, namespace)
        self.globals.update(code.globals)
        head, _, body = code.src.strip().partition("\n")
        if name != "forward":
            head = head.replace(f"def forward({self._root}, ", f"def {name}(", 1)
            head = head.replace(f"def forward({self._root}", f"def {name}(", 1)
        functions = "".join(textwrap.indent(function, "    ") + "\n\n" for function in inner)
        return f"{head}\n{functions}{body}".rstrip()

    def _write_module(self, name: str) -> _Text:
        return _Text(_format_target(self._root, name) if name else self._root)


def _find_ends(nodes: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Finds the inputs of a run of nodes, and its results that are used later."""
    members = set(nodes)
    inputs = dict.fromkeys(
        argument
        for node in nodes
        for argument in node.all_input_nodes
        if argument not in members and argument.op != "get_attr"
    )
    outputs = [node for node in nodes if any(user not in members for user in node.users)]
    return [*inputs], outputs


def _make_findable(function: Any) -> Callable[..., Any]:
    """Makes a function that torch.fx can write: itself where its qualified name leads back to it.

    The name does not for ``Function.apply``, nor for what ``torch/_tensor.py`` makes of operators:
    of one of this module, torch.fx puts the function itself among the code's globals.
    """
    with contextlib.suppress(
        AttributeError, RuntimeError
    ):  # the latter from 2.14 on: it has no name
        parts = _get_qualified_name(function).split(".")
        if parts[0] != "torch" or functools.reduce(getattr, parts[1:], torch) == function:
            return function  # type: ignore[no-any-return]

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__name__ = function.__name__
    return call
