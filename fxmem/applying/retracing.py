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
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from fxmem.analyzing import analyze_model
from fxmem.applying.state import keep_random_numbers
from fxmem.applying.surroundings import find_autocast, find_device, run_apart
from fxmem.errors import FxmemError
from fxmem.tracing.calls import bind_arguments
from fxmem.tracing.hooks import CALLED_HOOKS

_NUMBERS = (bool, int, float, complex)


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
                analysis = analyze_model(model, tuple(args), kwargs, **options)
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
    if traced is None:
        return False
    same = _find_same(model, args, kwargs)
    return [*_list_calls(graph, same)] == [*_list_calls(traced, same)]


def _find_same(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Arguments that are the same tensor, by their names: a graph may have either of them."""
    tensors = [(n, v) for n, v in bind_arguments(model, args, kwargs) if isinstance(v, Tensor)]
    first = {id(tensor): name for name, tensor in reversed(tensors)}
    return {name: first[id(tensor)] for name, tensor in tensors}


@contextlib.contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    tables = {name: model.__dict__[name] for name in CALLED_HOOKS}
    model.__dict__.update({name: OrderedDict() for name in CALLED_HOOKS})
    try:
        yield
    finally:
        model.__dict__.update(tables)


def _list_calls(graph: fx.Graph, same: Mapping[str, str]) -> Iterator[tuple[Any, ...]]:
    """The nodes of a graph, with their arguments: nodes as positions, numbers with their type.

    Args:
        graph: The graph.
        same: By the names of arguments, which of them stands for each.
    """
    positions = {node: at for at, node in enumerate(graph.nodes)}
    taken = {str(node.target): node for node in graph.nodes if node.op == "placeholder"}
    for name, other in same.items():
        if name in taken and other in taken:
            positions[taken[name]] = positions[taken[other]]

    def convert(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return _Position(positions[value])
        return (type(value), repr(value)) if isinstance(value, _NUMBERS) else value

    for node in graph.nodes:
        arguments = map_aggregate(node.args, convert), map_aggregate(node.kwargs, convert)
        yield node.op, node.target, *arguments


@dataclass(frozen=True, slots=True)
class _Position:
    """Of a node in its graph."""

    at: int
