"""Input sizes that a graph does not depend on, found by tracing the model with others."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fxmem.analyzing import trace_model
from fxmem.specs import TensorSpec
from fxmem.tracing.calls import bind_arguments
from fxmem.tracing.conditions import CONTEXT, TraceContext

_RANGES = "fxmem_size_ranges"
"""Key of the output's ``meta``: what :func:`find_size_ranges` found."""
_MOST_TRACES = 32
_NUMBERS = (bool, int, float, complex)

Place = tuple[str, int, int]
"""A dimension of an input: the argument's name, which of its tensors, and which dimension."""


@dataclass(frozen=True, slots=True)
class SizeRange:
    """Sizes that some dimensions, all of them equal, may have in a call.

    A decision such as ``x.shape[0] > 4`` that falls alike at both ends falls alike between them.

    Attributes:
        places: The dimensions.
        low: The smallest size.
        high: The largest size.
        step: What divides the size.
    """

    places: tuple[Place, ...]
    low: int
    high: int
    step: int = 1


def find_size_ranges(
    model: nn.Module, graph: fx.Graph, mode: str, size_hint: int | None
) -> tuple[SizeRange, ...]:
    """Finds the input sizes that a graph does not depend on, by tracing the model with others.

    The sizes of a traced graph are nodes of it, but what Python code decides by them is not: the
    arm of an ``if``, the turns of a loop, a number that ``math.sqrt`` made of one. Dimensions that
    were equal are changed together; then by their index in each tensor, as height and width are;
    then, where that changes the graph, one by one.

    Args:
        model: The model.
        graph: Its graph, which keeps the answer.
        mode: ``"train"`` or ``"infer"``.
        size_hint: How many elements are found where that depends on data.
    """
    (output,) = graph.find_nodes(op="output")
    if _RANGES not in output.meta:
        context: TraceContext | None = output.meta.get(CONTEXT)
        has_inputs = context is not None and context.inputs is not None
        output.meta[_RANGES] = (
            tuple(_Trials(model, graph, context, mode, size_hint).find()) if has_inputs else ()
        )
    found: tuple[SizeRange, ...] = output.meta[_RANGES]
    return found


_Dim = tuple[int, int]
"""Which distinct tensor of the inputs, and which dimension of it."""
_Found = tuple[list[_Dim], SizeRange]
"""Dimensions that are equal, and their range."""


class _Trials:
    """Traces of a model with other sizes."""

    def __init__(
        self, model: nn.Module, graph: fx.Graph, context: Any, mode: str, size_hint: int | None
    ) -> None:
        self._model, self._left = model, _MOST_TRACES
        self._calls = [*_list_calls(graph)]
        cpu, cuda = context.autocast
        device = "cpu" if cuda is None else "cuda"
        self._options: dict[str, Any] = {
            "mode": mode, "size_hint": size_hint, "autocast": cpu or cuda, "device": device,
        }  # fmt: skip
        self._leaves, self._structure = tree_flatten(context.inputs)
        found = {id(leaf): leaf for leaf in self._leaves if isinstance(leaf, TensorSpec)}
        self._specs: list[TensorSpec] = [*found.values()]
        self._positions = {key: at for at, key in enumerate(found)}

    def find(self) -> Iterator[SizeRange]:
        """Finds the ranges; none where those that were found one by one do not go together."""
        groups: dict[int, list[_Dim]] = defaultdict(list)
        for at, spec in enumerate(self._specs):
            for dim, size in enumerate(spec.shape):
                groups[size].append((at, dim))
        found = [each for size, dims in groups.items() for each in self._find_in(size, dims)]
        found = self._lower(found)
        if len(found) > 1:  # code may ask whether two sizes are equal
            shared = range(max(r.low for _, r in found), min(r.high for _, r in found) + 1)
            size = next((n for n in reversed(shared) if all(n % r.step == 0 for _, r in found)), 0)
            if size and self._try({dim: size for dims, _ in found for dim in dims}) == _OTHER:
                return
        places = self._list_places()
        for dims, each in found:
            yield replace(each, places=tuple(p for dim in dims for p in places[dim]))

    def _find_in(self, size: int, dims: Sequence[_Dim]) -> Iterator[_Found]:
        """The ranges, upwards, of dimensions that were equal."""
        whole = self._find_upper(size, dims)
        parts: dict[int, list[_Dim]] = defaultdict(list)
        for dim in dims:
            parts[dim[1]].append(dim)
        finer: Iterable[list[_Dim]] = parts.values()
        if len(parts) == 1:
            finer = () if whole else [[dim] for dim in dims if len(dims) > 1]
        tied = [*dims]
        for part in finer:
            if whole:  # what is free alone is so as far as all are
                each = whole if self._fits(part, whole.high) else None
            else:
                each = self._find_upper(size, part)
            if each:
                yield part, each
                tied = [dim for dim in tied if dim not in part]
        if whole and tied and (len(tied) == len(dims) or self._fits(tied, whole.high)):
            yield tied, whole

    def _find_upper(self, size: int, dims: Sequence[_Dim]) -> SizeRange | None:
        for high in (4 * size + 1, size + 1):  # of no particular divisor
            outcome = self._try(dict.fromkeys(dims, high))
            if outcome == _SAME:
                return SizeRange((), size, high)
            if outcome == _OTHER:
                return None
        if size > 1 and self._fits(dims, 2 * size):  # multiples alone, as U-Nets take
            step = size
            while step % 2 == 0 and self._fits(dims, step // 2):
                step //= 2
            return SizeRange((), step, 2 * size, step)
        return None

    def _lower(self, found: list[_Found]) -> list[_Found]:
        """Extends ranges downwards: all together where that goes, else each by itself."""
        for size in (1, 2):
            lowered = [(dims, _extend(each, size)) for dims, each in found]
            if self._try({dim: each.low for dims, each in lowered for dim in dims}) == _SAME:
                break
        else:
            size, lowered = 0, [*found]
        for at, (dims, each) in enumerate(lowered):
            is_batch = all(dim == 0 for _, dim in dims)
            for smaller in {0: (1, 2, each.low // 2 + 1), 2: (1,) * is_batch}.get(size, ()):
                extended = _extend(each, smaller)
                if extended != each and self._fits(dims, extended.low):
                    lowered[at] = dims, extended
                    break
        return lowered

    def _fits(self, dims: Sequence[_Dim], size: int) -> bool:
        return self._try(dict.fromkeys(dims, size)) == _SAME

    def _try(self, sizes: Mapping[_Dim, int]) -> str:
        """Tells whether the graph is the same with some other sizes."""
        if not self._left:
            return _OTHER
        self._left -= 1
        specs = [
            replace(spec, shape=tuple(sizes.get((at, dim), n) for dim, n in enumerate(spec.shape)))
            for at, spec in enumerate(self._specs)
        ]
        # A tensor that was given twice has to be one tensor.
        made = [
            torch.empty(
                spec.shape,
                dtype=getattr(torch, spec.dtype),
                device="meta",
                requires_grad=spec.requires_grad,
            )
            for spec in specs
        ]
        leaves = [
            made[self._positions[id(leaf)]] if isinstance(leaf, TensorSpec) else leaf
            for leaf in self._leaves
        ]
        args, kwargs = tree_unflatten(leaves, self._structure)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                graph, reason = trace_model(self._model, args, kwargs, **self._options)
            except Exception:  # the code does not take this size
                return _FAILS
        return _SAME if not reason and [*_list_calls(graph)] == self._calls else _OTHER

    def _list_places(self) -> dict[_Dim, list[Place]]:
        """By dimension, where calls have it."""
        places: dict[_Dim, list[Place]] = defaultdict(list)
        indexed = tree_unflatten([*range(len(self._leaves))], self._structure)
        for name, value in bind_arguments(self._model, *indexed):
            leaves = [self._leaves[at] for at in tree_leaves(value)]
            specs = [leaf for leaf in leaves if isinstance(leaf, TensorSpec)]
            for index, spec in enumerate(specs):
                for dim in range(len(spec.shape)):
                    places[self._positions[id(spec)], dim].append((name, index, dim))
        return places


_SAME, _OTHER, _FAILS = "same", "other", "fails"


def _extend(size_range: SizeRange, low: int) -> SizeRange:
    is_any = size_range.step == 1
    return replace(size_range, low=min(low, size_range.low)) if is_any else size_range


def _list_calls(graph: fx.Graph) -> Iterator[tuple[Any, ...]]:
    """The nodes of a graph with their arguments: nodes as positions, numbers with their type."""
    positions = {node: at for at, node in enumerate(graph.nodes)}

    def convert(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", positions[value])
        return (type(value), repr(value)) if isinstance(value, _NUMBERS) else value

    for node in graph.nodes:
        arguments = map_aggregate(node.args, convert), map_aggregate(node.kwargs, convert)
        yield node.op, node.target, *arguments
