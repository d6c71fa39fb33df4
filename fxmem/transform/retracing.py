"""Whether a plan's graph is also that of arguments with other sizes.

The sizes of a traced graph are nodes of it, but what the model's Python code decides by them is
not: the arm of an ``if``, the turns of a loop, a number that ``math.sqrt`` made of one. So the
model is traced again for sizes that are met first, and the two graphs are held against each other.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx, nn

from fxmem.api import analyze
from fxmem.errors import FxmemError
from fxmem.transform.state import keep_random_numbers
from fxmem.transform.surroundings import find_autocast, find_device, run_apart


def is_graph_of(
    graph: fx.Graph,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: str,
    size_hint: int | None = None,
) -> bool:
    """Whether a traced graph is what a model runs for some arguments.

    Args:
        graph: As it was traced for others.
        model: Whose graph it is.
        args: Positional arguments.
        kwargs: Keyword arguments.
        mode: ``"train"`` or ``"infer"``.
        size_hint: What was assumed of sizes that depend on data.
    """
    inputs = args, kwargs
    options: dict[str, Any] = {
        "mode": mode,
        "device": find_device(inputs),
        "size_hint": size_hint,
        "autocast": find_autocast(inputs),
    }

    def trace() -> fx.Graph | None:
        try:
            with _without_hooks(model):  # who calls the planned module has called them
                analysis = analyze(model, tuple(args), kwargs, **options)
        except FxmemError:  # it cannot be told: for these sizes the model's own code runs
            return None
        # Where the graph leaves something out, it says too little.
        traced: fx.Graph | None = analysis.fx_graph if analysis.frontend == "fx" else None
        return traced

    restore = keep_random_numbers()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = run_apart(trace)
    finally:
        restore()
    return traced is not None and [*_list_calls(graph)] == [*_list_calls(traced)]


@contextlib.contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    tables = {name: model.__dict__[name] for name in names}
    model.__dict__.update({name: OrderedDict() for name in names})
    try:
        yield
    finally:
        model.__dict__.update(tables)


def _list_calls(graph: fx.Graph) -> Iterator[tuple[Any, ...]]:
    """The nodes of a graph, each with its arguments, in which a node is its position."""
    positions = {node: at for at, node in enumerate(graph.nodes)}

    def convert(node: fx.Node) -> Any:
        return _Position(positions[node])

    for node in graph.nodes:
        arguments = fx.map_arg(node.args, convert), fx.map_arg(node.kwargs, convert)
        yield node.op, node.target, *arguments


class _Position(int):
    """Of a node in its graph, which is not the number that an argument may be."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Position) and int(self) == int(other)

    __hash__ = int.__hash__
