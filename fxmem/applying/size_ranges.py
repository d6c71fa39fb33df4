"""Input sizes that a graph does not depend on, found by tracing the model with others.

The sizes of a traced graph are nodes, but decisions of Python code are not: the arm of an ``if``,
the turns of a loop, a number that ``math.sqrt`` made of a size.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fxmem.analyzing import trace_model
from fxmem.recording.size_hints import SizeHint
from fxmem.specs import TensorSpec
from fxmem.tracing.calls import bind_arguments
from fxmem.tracing.conditions import CONTEXT, TraceContext
from fxmem.tracing.fxgraph import list_calls
from fxmem.training.options import resolve_autocast, resolve_device

_RANGES = "fxmem_size_ranges"
"""Key of the output's ``meta``: the ranges, which later plans of one analysis take from there."""
_MOST_TRACES = 32
_CHANNELS = 4
"""Dimensions up to this size are rarely free, and are tried by themselves."""
_SAME, _OTHER, _FAILS = "same", "other", "fails"

InputDimension = tuple[str, int, int]
"""A dimension of an input: the argument's name, which of its tensors, and which dimension."""
_Dim = tuple[int, int]
"""The positions of a distinct tensor among the inputs, and of a dimension in it."""


@dataclass(frozen=True, slots=True)
class SizeRange:
    """Sizes that some dimensions, all of them equal, may have in a call.

    A decision such as ``x.shape[0] > 4`` that falls alike at both ends falls alike between them.
    """

    places: tuple[InputDimension, ...]  # the dimensions
    low: int  # the smallest size
    high: int  # the largest size
    step: int = 1  # the number that divides the size

    def lower(self, low: int) -> SizeRange:
        """Extends the range downwards, where it is not one of multiples."""
        return replace(self, low=min(low, self.low)) if self.step == 1 else self


_Found = tuple[list[_Dim], SizeRange]
"""Dimensions that stay equal, and their range."""


def find_size_ranges(
    model: nn.Module, graph: fx.Graph, mode: str, size_hint: SizeHint
) -> tuple[SizeRange, ...]:
    """Finds the input sizes that a model's graph does not depend on, and keeps them with it."""
    (output,) = graph.find_nodes(op="output")
    if _RANGES not in output.meta:
        context: TraceContext = output.meta[CONTEXT]
        trials = context.inputs and _Trials(model, graph, context, mode, size_hint)
        output.meta[_RANGES] = tuple(trials.find()) if trials else ()
    found: tuple[SizeRange, ...] = output.meta[_RANGES]
    return found


class _Trials:
    def __init__(
        self, model: nn.Module, graph: fx.Graph, context: Any, mode: str, size_hint: SizeHint
    ) -> None:
        self._model, self._left = model, _MOST_TRACES
        self._calls = [*list_calls(graph)]
        cpu, cuda = context.autocast
        device = "cpu" if cuda is None else "cuda"
        options = resolve_device(device, None, None, None, size_hint)
        self._options = replace(
            options, mode=mode, autocast=resolve_autocast(cpu or cuda, options.target)
        )
        self._leaves, self._structure = tree_flatten(context.inputs)
        found = {id(leaf): leaf for leaf in self._leaves if isinstance(leaf, TensorSpec)}
        self._specs: list[TensorSpec] = [*found.values()]
        self._positions = {key: at for at, key in enumerate(found)}

    def find(self) -> Iterator[SizeRange]:
        """Finds the ranges: of all large dimensions at once, or size by size."""
        parts: dict[tuple[int, int], list[_Dim]] = defaultdict(list)
        for at, spec in enumerate(self._specs):
            for dim, size in enumerate(spec.shape):
                parts[size, dim].append((at, dim))  # a batch has the same size in all inputs
        large = [key for key in parts if key[0] > _CHANNELS]
        found = self._raise({key: parts[key] for key in large}, 4, 1)
        for size in dict.fromkeys(size for size, _ in parts if size <= _CHANNELS or not found):
            found += self._find_in(size, {k: dims for k, dims in parts.items() if k[0] == size})
        if not found:
            return
        found, are_equal = self._lower(found)
        if not are_equal:  # the graph may be another where sizes that were not equal are
            shared = range(max(r.low for _, r in found), min(r.high for _, r in found) + 1)
            fitting = (n for n in reversed(shared) if all(n % r.step == 0 for _, r in found))
            largest = next(fitting, 0)
            if largest and self._try({d: largest for dims, _ in found for d in dims}) == _OTHER:
                return
        places: dict[_Dim, list[InputDimension]] = defaultdict(list)
        indexed = tree_unflatten([*range(len(self._leaves))], self._structure)
        for name, value in bind_arguments(self._model, *indexed):
            leaves = [self._leaves[at] for at in tree_leaves(value)]
            specs = [leaf for leaf in leaves if isinstance(leaf, TensorSpec)]
            for index, spec in enumerate(specs):
                for dim in range(len(spec.shape)):
                    places[self._positions[id(spec)], dim].append((name, index, dim))
        for dims, each in found:
            yield replace(each, places=tuple(p for dim in dims for p in places[dim]))

    def _find_in(self, size: int, parts: Mapping[tuple[int, int], list[_Dim]]) -> list[_Found]:
        """Finds ranges of the dimensions of one size: each by itself, all tied, or some."""
        tied = {(size, 0): [dim for dims in parts.values() for dim in dims]}
        for groups in (parts, tied)[len(parts) == 1 :]:
            for factor, step in ((4, 1), (2, size), (1, 1))[: 3 if size > _CHANNELS else 2]:
                found = self._raise(groups, factor, step)
                if found:
                    return found
        if len(parts) == 1:
            return []
        return [each for key, dims in parts.items() for each in self._raise({key: dims}, 4, 1)]

    def _raise(
        self, groups: Mapping[tuple[int, int], list[_Dim]], factor: int, step: int
    ) -> list[_Found]:
        """Tries each group with another large size: by no common divisor, or multiples."""
        found = [
            (dims, SizeRange((), size, factor * size + (1 + at if step == 1 else at * step), step))
            for at, ((size, _), dims) in enumerate(groups.items())
        ]
        if not found or self._try({dim: r.high for dims, r in found for dim in dims}) != _SAME:
            return []
        while step > 1 and step % 2 == 0:
            lower = [(dims, replace(r, low=step // 2, step=step // 2)) for dims, r in found]
            if self._try({dim: r.low for dims, r in lower for dim in dims}) != _SAME:
                break
            step, found = step // 2, lower
        return found

    def _lower(self, found: list[_Found]) -> tuple[list[_Found], bool]:
        """Extends ranges downwards; returns also whether all were tried with one size."""
        for size in (1, 2):
            lowered = [(dims, each.lower(size)) for dims, each in found]
            if self._try({dim: r.low for dims, r in lowered for dim in dims}) == _SAME:
                break
        else:
            size, lowered = 0, found
        are_equal = size > 0 and len({each.low for _, each in lowered}) == 1
        result = []
        for dims, each in lowered:
            is_batch = all(dim == 0 for _, dim in dims)
            smaller = (1, 2, each.low // 2 + 1) if size == 0 else (1,) * is_batch
            extended = (r for r in map(each.lower, smaller) if r != each)
            fits = (r for r in extended if self._try(dict.fromkeys(dims, r.low)) == _SAME)
            result.append((dims, next(fits, each)))
        return result, are_equal

    def _try(self, sizes: Mapping[_Dim, int]) -> str:
        """Returns whether the graph is the same with some other sizes."""
        if not self._left:
            return _OTHER
        self._left -= 1
        specs = [
            replace(spec, shape=tuple(sizes.get((at, dim), n) for dim, n in enumerate(spec.shape)))
            for at, spec in enumerate(self._specs)
        ]
        # A tensor that was given twice has to be one tensor.
        made = [
            torch.empty(s.shape, dtype=getattr(torch, s.dtype), device="meta").requires_grad_(
                s.requires_grad
            )
            for s in specs
        ]
        leaves = [
            made[self._positions[id(leaf)]] if isinstance(leaf, TensorSpec) else leaf
            for leaf in self._leaves
        ]
        args, kwargs = tree_unflatten(leaves, self._structure)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                graph, reason = trace_model(self._model, args, kwargs, self._options)
            except Exception:  # the code does not take this size
                return _FAILS
        return _SAME if not reason and [*list_calls(graph)] == self._calls else _OTHER
