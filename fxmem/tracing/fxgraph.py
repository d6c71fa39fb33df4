"""The FX graph of a model's forward, under construction."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx import traceback
from torch.fx.node import map_aggregate

from fxmem.fakes.containers import iterate_paths, iterate_tensors
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
from fxmem.tracing.modules import find_watched
from fxmem.tracing.nodes import ACCESSORS, Call, read_origin
from fxmem.tracing.sizes import Arithmetic, SizeInt

NODE = "fxmem_node"
"""Key of an FX node's ``meta``: the name of the traced node."""
CONSTANT = "fxmem_constant"
"""Key of a placeholder's ``meta``: its value, where no tensor is in it: the graph is for that."""
ENTERED = "fxmem_entered"
"""Key of the output's ``meta``: names of the modules that were called and are no nodes."""
WATCHED = "fxmem_watched"
"""Key of a module call's ``meta``: whether its hooks may keep what it is given, and its result."""
_DEVICE = "device"
_CONSTANTS = (
    int,
    float,
    complex,
    bool,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type(None),
    type(...),
)


_OPERATORS = {
    function: name
    for name, function in vars(torch.Tensor).items()
    if name.startswith("__")
    and not name.startswith("__torch")
    and getattr(function, "__name__", name) != name
}
"""Methods such as ``__pow__`` that are another function, wrapped, and have its name."""


@functools.lru_cache(maxsize=4096)
def describe_function(func: Callable[..., Any]) -> tuple[str, Any, str]:
    """Finds op, target and the name for a reader of a function that the tracer's mode saw.

    >>> describe_function(torch.Tensor.view)
    ('call_method', 'view', 'view')
    """
    name = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__", "__delete__"):
        accessor = {"__get__": getattr, "__set__": setattr, "__delete__": delattr}[name]
        return "call_function", accessor, func.__self__.__name__  # type: ignore[attr-defined]
    label = name[2:-2] if name.startswith("__") and name.endswith("__") else name
    if any(getattr(owner, name, None) is func for owner in (torch.Tensor, torch._C.TensorBase)):
        return "call_method", name, label
    if func in _OPERATORS:
        return "call_method", _OPERATORS[func], label
    public = getattr(torch, name, None)
    return "call_function", public if public == func else func, label


class GraphBuilder:
    """An FX graph under construction, of a model whose tensors and submodules it refers to."""

    def __init__(self, model: nn.Module) -> None:
        self.reason = ""  # the first thing that the graph cannot express
        self._model = model
        self.graph = fx.Graph()
        self._attributes = {
            id(tensor): name
            for named in (model.named_buffers, model.named_parameters)
            for name, tensor in named(remove_duplicate=True)
        }
        self._made: dict[Any, fx.Node] = {}
        self._anchor: tuple[torch.device, fx.Node, tuple[Any, ...]] | None = None
        self._keeps_sizes = False
        self._context, self._settings = read_context(), read_settings()
        self._traced_in: TraceContext | None = None

    def give_up(self, reason: str) -> None:
        """Remembers why the graph cannot be replayed; the first reason stays."""
        self.reason = self.reason or reason

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Begins the graph, which is for the context of the caller."""
        self._context, self._settings = read_context(), read_settings()
        bound = [value for _, value in bind_arguments(self._model, args, kwargs)]
        tensors: list[torch.Tensor] = []
        describe_structure(bound, tensors)
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

    def add_placeholder(self, name: str, value: Any) -> fx.Node:
        """Adds an input of the model."""
        node: fx.Node = self.graph.placeholder(name)
        if next(iterate_tensors(value), None) is None:
            node.meta[CONSTANT] = value
            return node
        node.meta[SIGNATURE] = describe_value(value)
        for path, tensor in iterate_paths(value):
            if self._anchor is None and id(tensor) not in self._attributes:
                self._anchor = tensor.device, node, path
        return node

    def add(self, call: Call, args: tuple[Any, ...], result: Any, name: str) -> fx.Node:
        """Adds the node of a call that has returned."""
        op, target = self._keep_context(call, result)
        # A Function of the user's own; PyTorch's functions take any tuple for a size.
        self._keeps_sizes = isinstance(getattr(target, "__self__", None), type)
        fx_args = tuple(self._convert(arg, name) for arg in args)
        fx_kwargs = {key: self._convert(arg, name) for key, arg in call.kwargs.items()}
        node = self.graph.create_node(op, target, fx_args, fx_kwargs, name=name)
        node.meta[NODE] = name
        if "from_node" in traceback.get_current_meta():  # an Interpreter says which it runs
            node.meta["from_node"] = traceback.get_current_meta()["from_node"]
        if op == "call_module":
            node.meta[WATCHED] = find_watched(self._model.get_submodule(target))
        return node

    def end(self, output: Any, entered: frozenset[str]) -> None:
        """Adds the output; the modules that were entered are no nodes."""
        self._keeps_sizes = True
        node = self.graph.output(self._convert(output, "the output"))
        node.meta[CONTEXT], node.meta[ENTERED] = self._traced_in, entered

    def _keep_context(self, call: Call, result: Any) -> tuple[str, Any]:
        """Finds the op and target that run a call as the code's own context has it."""
        outer, inner = self._context, read_context()
        for name, value in read_settings().items():
            if value != self._settings[name]:
                self.give_up(f"the code itself sets {name}")
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
            self.give_up(f"the code itself turns {kind} on or off")
            return call.op, call.target
        return "call_function", within

    def _convert(self, value: Any, where: str) -> Any:
        """Converts a call's argument to what the graph holds: nodes for tensors and sizes."""
        if isinstance(value, torch.Tensor):
            return self._convert_tensor(value, where)
        if isinstance(value, SizeInt):
            return self._convert_size(value)
        if isinstance(value, torch.device) and self._anchor is not None:
            # A GPU's tensors are fakes on cpu:0, whatever the code sees: fakes/devices.py.
            device, node, path = self._anchor
            if value.type != "cpu" or device.index is None:
                # The graph runs wherever its first input is.
                return self._add_after(self._follow_path(node, path), getattr, "device")
        if isinstance(value, _CONSTANTS):
            return value
        kind: Any = type(value)
        if isinstance(value, slice):
            return slice(*(self._convert(e, where) for e in (value.start, value.stop, value.step)))
        if kind is torch.Size or hasattr(kind, "n_sequence_fields"):  # as torch.max returns
            elements = [self._convert(element, where) for element in value]
            keeps = kind is not torch.Size or self._keeps_sizes
            return self.graph.call_function(kind, (tuple(elements),)) if keeps else tuple(elements)
        if _is_plain(value):
            if isinstance(value, (tuple, list)):
                converted = [self._convert(element, where) for element in value]
                if hasattr(kind, "_fields"):
                    return self.graph.call_function(kind, tuple(converted))
                return tuple(converted) if kind is tuple else converted
            if dataclasses.is_dataclass(value):
                names = [field.name for field in dataclasses.fields(value) if field.init]
                fields = {name: self._convert(getattr(value, name), where) for name in names}
                return self.graph.call_function(kind, (), fields)
            items = {key: self._convert(element, where) for key, element in value.items()}
            return items if kind is dict else self.graph.call_function(kind, (items,))
        if isinstance(value, numbers.Integral):  # numpy's
            return int(value)
        self.give_up(f"no graph holds the {kind.__name__} in {where}")
        return f"<{kind.__name__}>"

    def _convert_tensor(self, tensor: torch.Tensor, where: str) -> Any:
        attribute = self._attributes.get(id(tensor))
        origin = read_origin(tensor)
        if attribute is None and origin is None:  # a tensor that a module has not registered
            attributes = (
                f"{prefix}.{name}".strip(".")
                for prefix, module in self._model.named_modules()
                for name, value in vars(module).items()
                if value is tensor
            )
            attribute = next(attributes, None)
        if attribute is not None:
            if attribute not in self._made:
                self._made[attribute] = self.graph.get_attr(attribute)
            return self._made[attribute]
        if origin is None or origin.fx_node is None:
            self.give_up(f"{where} uses a tensor that is no input, parameter, buffer or result")
            return "<Tensor>"
        return self._follow_path(origin.fx_node, origin.path)

    def _follow_path(self, node: fx.Node, path: tuple[Any, ...]) -> fx.Node:
        for key in path:
            is_field = isinstance(key, tuple) and key[0] is getattr
            node = self._add_after(
                node, getattr if is_field else operator.getitem, key[1] if is_field else key
            )
        return node

    def _convert_size(self, size: SizeInt) -> fx.Node:
        expression = size.expression
        if isinstance(expression, Arithmetic):
            arguments = tuple(
                self._convert_size(a) if isinstance(a, SizeInt) else a for a in expression.arguments
            )
            return self.graph.call_function(expression.function, arguments)
        origin = expression.origin
        node = self._follow_path(origin.fx_node, origin.path)
        return self._add_after(node, "size", expression.dim)

    def _add_after(self, node: fx.Node, call: Any, argument: Any) -> fx.Node:
        """Adds a call of a function or method next to the node that it asks, each once."""
        step = (node, call, argument)
        if step not in self._made:
            add = self.graph.call_method if isinstance(call, str) else self.graph.call_function
            with self.graph.inserting_after(node):  # not between nodes that it is no part of
                self._made[step] = add(call, (node, argument))
        return self._made[step]


def _is_plain(value: Any) -> bool:
    """Returns whether a list, tuple, dict or dataclass is made again of its elements alone."""
    kind: Any = type(value)
    if kind in (list, tuple, dict, OrderedDict):
        return not isinstance(value, dict) or all(isinstance(key, str) for key in value)
    if hasattr(kind, "_fields"):  # a named tuple; torch's own packed sequences check themselves
        return kind.__base__ is tuple or kind.__module__.startswith("torch.")
    if not dataclasses.is_dataclass(kind) or isinstance(value, (list, tuple)):
        return False
    names = [field.name for field in dataclasses.fields(value) if field.init]
    code = getattr(kind.__dict__.get("__init__"), "__code__", None)
    if code is None or code.co_filename != "<string>":  # not the one that dataclasses write
        return False
    if not {*getattr(value, "__dict__", ())} <= {*names}:
        return False
    if isinstance(value, OrderedDict):  # as models of Hugging Face return: its base fills it
        filled = [name for name in names if getattr(value, name) is not None]
        return "__post_init__" not in vars(kind) and [*value] == filled
    return not hasattr(kind, "__post_init__") and not isinstance(value, dict)


def list_calls(graph: fx.Graph) -> Iterator[tuple[Any, ...]]:
    """Lists the calls of a graph: nodes as positions, numbers with their types."""
    positions = {node: at for at, node in enumerate(graph.nodes)}

    def convert(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", positions[value])
        return (type(value), repr(value)) if isinstance(value, bool | int | float) else value

    for node in graph.nodes:
        arguments = map_aggregate(node.args, convert), map_aggregate(node.kwargs, convert)
        yield node.op, node.target, *arguments
