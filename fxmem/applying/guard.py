"""Guards of a planned model: a cheap comparison of each call with what its graph was traced for.

Each guard answers with the first difference that it finds, in words; empty where there is none.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.utils.module_tracker import ModuleTracker

from fxmem.applying.codegen import SEEN
from fxmem.applying.size_ranges import SizeRange
from fxmem.tracing.calls import bind_arguments
from fxmem.tracing.conditions import (
    CONTEXT,
    SIGNATURE,
    Signature,
    TraceContext,
    describe_structure,
    read_autocast_on,
)
from fxmem.tracing.fxgraph import CONSTANT, ENTERED
from fxmem.tracing.modules import (
    CALLED_HOOKS,
    GLOBAL_HOOKS,
    INTERNAL,
    PLAIN,
    find_class,
    find_watched,
    is_leaf,
    is_left_out,
)


class _Missing:
    """Marks an attribute that is not there; a class, which a copy or a file has too."""


Values = dict[tuple[str, str], Any]
"""By names of modules and of their attributes, plain values."""


class InputGuard:
    """The arguments of a call, their sizes, and the autocast around it."""

    def __init__(self, model: nn.Module, graph: fx.Graph, ranges: Sequence[SizeRange]) -> None:
        self._model = model
        (output,) = graph.find_nodes(op="output")
        context: TraceContext = output.meta[CONTEXT]
        self._autocast = next(filter(None, context.autocast), None)
        self._ties = context.ties
        self._taken = {str(n.target): n.meta for n in graph.find_nodes(op="placeholder")}
        signatures: dict[str, Signature] = {
            name: meta[SIGNATURE] for name, meta in self._taken.items() if SIGNATURE in meta
        }
        self._sizes = [size for each in signatures.values() for size in each.sizes]
        self._labels = [name for name, each in signatures.items() for _ in each.sizes]
        self._ranges = [
            (each, [(self._labels.index(name) + at, dim) for name, at, dim in each.places])
            for each in ranges
        ]
        free = {place for _, places in self._ranges for place in places}
        self._fixed = [
            (at, dim, size)
            for at, sizes in enumerate(self._sizes)
            for dim, size in enumerate(sizes)
            if (at, dim) not in free
        ]
        try:
            parameters = [*inspect.signature(model.forward).parameters.values()]
        except (TypeError, ValueError):  # no signature
            parameters = []
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

    def compare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, list[Any]]:
        """Compares a call with the traced one; returns also the arguments in the graph's order."""
        given = {**self._defaults, **dict(bind_arguments(self._model, args, kwargs))}
        values, tensors = list[Any](), list[Tensor]()
        for name in given.keys() - self._taken.keys():
            if not _is_equal(given[name], self._defaults.get(name, _Missing)):
                return f"argument {name} was not given when the model was traced", values
        for name, meta in self._taken.items():
            value = given.get(name, _Missing)
            values.append(value)
            if value is _Missing:
                return f"argument {name} is missing", values
            if CONSTANT in meta:
                if not _is_equal(value, meta[CONSTANT]):
                    return f"argument {name} is not {meta[CONSTANT]!r}", values
            elif describe_structure(value, tensors) != meta[SIGNATURE].structure:
                return (
                    f"argument {name} has another structure, dtype, rank or requires_grad",
                    values,
                )
        if any(tensors[at] is not tensors[first] for at, first in self._ties):
            return "two arguments are not one tensor", values
        is_cuda = any(tensor.is_cuda for tensor in tensors)
        if read_autocast_on("cuda" if is_cuda else "cpu") != self._autocast:
            return f"autocast is not {self._autocast or 'off'}", values
        return self._find_other_size([tensor.shape for tensor in tensors]), values

    def _find_other_size(self, sizes: Sequence[torch.Size]) -> str:
        if sizes == self._sizes:
            return ""
        for at, dim, size in self._fixed:
            if sizes[at][dim] != size:
                return f"dimension {dim} of {self._labels[at]} is not {size}"
        for each, places in self._ranges:
            found = [(sizes[at][d], f"dimension {d} of {self._labels[at]}") for at, d in places]
            size, label = found[0]
            for other, name in found:
                if other != size:
                    return f"{label} and {name} are not equal"
            if not each.low <= size <= each.high or size % each.step:
                steps = f" in steps of {each.step}" if each.step > 1 else ""
                return f"{label} is not within {each.low} to {each.high}{steps}"
        return ""


class AttributeGuard:
    """The modules whose code was traced: their attributes, modes, hooks and children.

    Modules that the graph calls are left out: they read their attributes in each call. A copy gets
    the values that attributes had when the plan was applied.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph, values: Values | None = None) -> None:
        (output,) = graph.find_nodes(op="output")
        context: TraceContext = output.meta[CONTEXT]
        entered: frozenset[str] = output.meta[ENTERED]
        seen = [node.meta[SEEN] for node in graph.nodes if SEEN in node.meta]
        called = {str(node.target) for node in graph.find_nodes(op="call_module")}
        called.update(*(consumers for _, consumers in seen))
        used = set[str]()
        for name in (*entered, *called):
            while name:
                used.add(name)
                name = name.rpartition(".")[0]
        traced = {"": model}
        for name, module in model.named_modules(remove_duplicate=False):
            is_read = name not in called and (name in used or is_leaf(module))
            if is_read and name.rpartition(".")[0] in traced:
                traced.setdefault(name, module)
        held = {(n, k): v for n, m in traced.items() for k, v in _iterate_plain(m, not n)}
        self.values: Values = held if values is None else values
        self._attributes = [
            (vars(traced[n]), k, v, f"{n}.{k}".strip("."))
            for (n, k), v in self.values.items()
            if n in traced
        ]
        self._lengths = [(n, m, len(vars(m)), frozenset(vars(m))) for n, m in traced.items()]
        self._modes = [
            (n, m, n in context.training)
            for n, m in traced.items()
            if n and (is_leaf(m) or not find_class(m).__module__.startswith("torch.nn"))
        ]
        self._children = [(n, m._modules, [*m._modules.values()]) for n, m in traced.items()]
        self._tensors = [
            (table, key, tensor.dtype, tensor.shape, name in context.frozen, name)
            for n, m in model.named_modules()
            for table in (m._parameters, m._buffers)
            for key, tensor in table.items()
            for name in (f"{n}.{key}".strip("."),)
            if tensor is not None and not is_lazy(tensor)
        ]
        self._hooks = [
            (n, getattr(m, key)) for n, m in traced.items() if n in entered for key in CALLED_HOOKS
        ]
        self._seen = [
            (name, model.get_submodule(name), at)
            for makers, consumers in seen
            for at, names in enumerate((consumers, makers))  # as in `find_watched`
            for name in names
        ]
        self._sees_all = bool(entered or seen)

    def find_difference(self) -> str:
        """Compares the modules with what they were."""
        for name, hooks in self._hooks:
            if hooks and is_left_out(hooks):
                return f"the graph does not call {name}, which has hooks"
        for name, module, at in self._seen:
            if find_watched(module)[at]:
                return f"hooks of {name} may keep a value that the plan overwrites"
        if self._sees_all and any(GLOBAL_HOOKS):
            hooks = [hook for table in GLOBAL_HOOKS for hook in table.values()]
            # PyTorch's own counters are no obstacle.
            if any(not isinstance(getattr(h, "__self__", None), ModuleTracker) for h in hooks):
                return "the graph does not call all modules, and there are hooks on all"
        for name, module, mode in self._modes:
            if module.training is not mode:
                now, then = ("eval", "train") if mode else ("train", "eval")
                return f"module {name!r} is in {now} mode, and the plan was traced in {then} mode"
        for held, key, value, name in self._attributes:
            now = held.get(key, _Missing)
            if now is not value and not _is_equal(now, value):
                return f"attribute {name} has changed since the plan was applied"
        for name, module, count, known in self._lengths:
            if len(vars(module)) != count:
                for key, value in _iterate_plain(module, not name):
                    if key not in known and value is not _Missing:
                        return f"attribute {name}.{key} was set after the plan was applied"
        for name, table, children in self._children:
            if len(table) != len(children) or not all(map(operator.is_, table.values(), children)):
                return f"modules of {name or 'the model'} were replaced after the plan was applied"
        for table, key, dtype, shape, is_frozen, name in self._tensors:
            tensor = table.get(key)
            if tensor is None or tensor.dtype is not dtype or tensor.shape != shape:
                return f"{name} has another dtype or size than when the plan was applied"
            if is_frozen and tensor.requires_grad:
                return f"{name} was frozen when the model was traced"
        return ""


def _iterate_plain(module: nn.Module, is_root: bool) -> Iterator[tuple[str, Any]]:
    """Yields plain attributes of a module, and a ``forward`` that hides its class's."""
    if not is_root:  # whose own forward is what a plan replaces
        yield "forward", vars(module).get("forward", _Missing)
    for key, value in vars(module).items():
        if key not in INTERNAL and not key.startswith("_fxmem") and isinstance(value, PLAIN):
            yield key, value


def _is_equal(value: Any, other: Any) -> bool:
    """Returns whether two values are equal in type too, and in the sign of a zero."""
    if value is other:
        return True
    if type(value) is not type(other) or not isinstance(value, (*PLAIN, torch.dtype, tuple, list)):
        return False
    return value == other and (bool(value) or repr(value) == repr(other))
