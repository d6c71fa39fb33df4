"""The code of a graph whose nodes lie in segments: each a function of its own in ``forward``.

The graph stays flat, as it was traced; which segments a node lies in is in its ``meta``. Only the
code differs from what torch.fx writes, ``torch/fx/graph.py`` (``CodeGen._gen_python_code``), of
which the text of each function still comes.
"""

from __future__ import annotations

import functools
import itertools
import operator
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen, PythonCode, _format_target, _Namespace
from torch.fx.node import _get_qualified_name

from fxmem.applying.overwriting import (
    overwrite_by_function,
    overwrite_by_method,
    overwrite_by_module,
)
from fxmem.applying.runtime import checkpoint
from fxmem.planning.inplace.forms import FormKind, InplaceForm

SEGMENTS = "fxmem_segments"
"""Key of a node's ``meta``: the segments it lies in, outermost first."""
OVERWRITE = "fxmem_overwrite"
"""Key of a node's ``meta``: how it runs in place, where it does."""


@dataclass(frozen=True, slots=True)
class SegmentCode:
    """A segment as the code knows it.

    Attributes:
        name: Of its function.
        norms: Its batch normalisations, by the names of their modules.
        states: What else it changes: names of modules, and of their tensors.
    """

    name: str
    norms: tuple[str, ...]
    states: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class OverwriteCode:
    """A node that runs in place, as the code knows it.

    Attributes:
        form: What is called.
        is_second: Whether the second of the node's two values is overwritten.
        makers: Name of the module that made the value, where one did.
        takers: Names of the other modules that take it.
    """

    form: InplaceForm
    is_second: bool = False
    makers: tuple[str, ...] = ()
    takers: tuple[str, ...] = ()


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
        """The text of a function and, within it, of those of its segments.

        Args:
            name: Of the function.
            nodes: Its body; those of ``forward`` bring their placeholders and output along.
            depth: How many segments the function lies in.
            ends: The nodes that are its arguments and its results; None for ``forward``.
        """
        scope = _Scope()
        inner = []
        if ends is not None:
            for node in ends[0]:
                scope.add_placeholder(node)
        for segment, group in itertools.groupby(nodes, lambda n: _find_segment(n, depth)):
            members = [*group]
            if segment is None:
                for node in members:
                    scope.copy(node, self._root)
                continue
            assert segment.name not in self._names, f"{segment.name} is not of one piece"
            self._names.add(segment.name)
            ends_inside = _find_ends(members)
            inner.append(self.write_function(segment.name, members, depth + 1, ends_inside))
            scope.call_segment(segment, self._root, members)
        if ends is not None:
            scope.add_output(ends[1])
        head, _, body = self._write_graph(scope.graph, name).partition("\n")
        functions = "".join(textwrap.indent(function, "    ") + "\n\n" for function in inner)
        return f"{head}\n{functions}{body}".rstrip()

    def _write_graph(self, graph: fx.Graph, name: str) -> str:
        # Globals keep the names that they have in the functions written before.
        namespace = _Namespace()
        for known, value in self.globals.items():
            namespace.create_name(known, value)
        for node in graph.nodes:
            node._repr_fn = lambda n: namespace.create_name(n.name, n)
        code = graph._codegen._gen_python_code(graph.nodes, self._root, namespace)
        self.globals.update(code.globals)
        text = code.src.strip()
        if name != "forward":
            text = text.replace(f"def forward({self._root}, ", f"def {name}(", 1)
            text = text.replace(f"def forward({self._root}", f"def {name}(", 1)
        return text


class _Scope:
    """The graph of one function."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}

    def copy(self, node: fx.Node, root: str) -> None:
        overwrite: OverwriteCode | None = node.meta.get(OVERWRITE)
        if overwrite is not None:
            self._values[node] = self._overwrite(node, overwrite, root)
            return
        copied = self.graph.node_copy(node, self._find)
        if callable(node.target) and not _is_found_by_name(node.target):
            copied.target = _hide_origin(node.target)
        self._values[node] = copied

    def _overwrite(self, node: fx.Node, overwrite: OverwriteCode, root: str) -> fx.Node:
        args: list[Any] = [*fx.map_arg(node.args, self._find)]
        options: dict[str, Any] = dict(fx.map_arg(node.kwargs, self._find))
        kind, name = overwrite.form.kind, overwrite.form.name
        if kind is FormKind.METHOD:
            function: Any = overwrite_by_method
            # Functions of torch take by name what methods take by place.
            args += [options.pop(key) for key in ("input", "self", "other") if key in options]
            if "inplace" in options or node.target is torch.nn.functional.relu:  # has the flag
                args, options = args[:1], {}
            args = [name, *(args[1::-1] if overwrite.is_second else args)]
        elif kind is FormKind.FUNCTION:
            function = overwrite_by_function
            args = [name, *args]
        else:
            function = overwrite_by_module
            args = [_Text(_format_target(root, str(node.target))), *args, *options.values()]
            options = {}
        for key, names in (("makers", overwrite.makers), ("takers", overwrite.takers)):
            if names:
                options[key] = tuple(_Text(_format_target(root, name)) for name in names)
        return self.graph.create_node(
            "call_function", function, tuple(args), options, name=node.name
        )

    def add_placeholder(self, node: fx.Node) -> None:
        self._values[node] = self.graph.placeholder(node.name)

    def add_output(self, nodes: Sequence[fx.Node]) -> None:
        values = tuple(self._find(node) for node in nodes)
        self.graph.output(values[0] if len(values) == 1 else values)

    def call_segment(self, segment: SegmentCode, root: str, nodes: Sequence[fx.Node]) -> None:
        inputs, outputs = _find_ends(nodes)
        options: dict[str, Any] = {}
        if segment.norms:
            options["norms"] = tuple(_Text(_format_target(root, name)) for name in segment.norms)
        if segment.states:
            options["states"] = tuple(
                (_Text(_format_target(root, module) if module else root), name)
                for module, name in segment.states
            )
        arguments: Any = (_Text(segment.name), *map(self._find, inputs))
        name = outputs[0].name if len(outputs) == 1 else f"{segment.name}_results"
        call = self.graph.create_node("call_function", checkpoint, arguments, options, name=name)
        if len(outputs) == 1:
            self._values[outputs[0]] = call
            return
        for index, node in enumerate(outputs):
            self._values[node] = self.graph.create_node(
                "call_function", operator.getitem, (call, index), name=node.name
            )

    def _find(self, node: fx.Node) -> fx.Node:
        if node not in self._values and node.op == "get_attr":
            self._values[node] = self.graph.node_copy(node)
        return self._values[node]


def _find_segment(node: fx.Node, depth: int) -> SegmentCode | None:
    path = node.meta.get(SEGMENTS, ())
    return path[depth] if len(path) > depth else None


def _find_ends(nodes: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """What a run of nodes takes from before it, and what of it is used after it."""
    members = set(nodes)
    inputs = dict.fromkeys(
        argument
        for node in nodes
        for argument in node.all_input_nodes
        if argument not in members and argument.op != "get_attr"
    )
    outputs = [node for node in nodes if any(user not in members for user in node.users)]
    return [*inputs], outputs


def _is_found_by_name(function: Any) -> bool:
    """Tells whether the name that torch.fx writes for a function of torch leads back to it.

    It does not for ``Function.apply``, nor for what ``torch/_tensor.py`` makes of operators.
    """
    parts = _get_qualified_name(function).split(".")
    if parts[0] != "torch":
        return True
    try:
        return bool(functools.reduce(getattr, parts[1:], torch) == function)
    except AttributeError:
        return False


def _hide_origin(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one of this module, which torch.fx puts among the code's globals."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__name__ = function.__name__
    return call
