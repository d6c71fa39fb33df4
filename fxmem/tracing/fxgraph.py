"""The FX graph under construction: origins of tensors, and arguments as a graph holds them."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

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
_ORIGIN = "_fxmem_origin"
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


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """The node that a tensor comes from, and the way to it in that node's result.

    Kept as an attribute of the tensor object: it goes when the tensor goes.
    """

    node: int  # index of the traced node
    fx_node: fx.Node | None  # None for what the loss function makes
    path: tuple[Any, ...] = ()  # keys and indices into the node's result


PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})


def iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in a value, through lists, tuples, dicts and dataclasses."""
    found: list[torch.Tensor] = []
    _collect_tensors(value, found)
    return iter(found)


def _collect_tensors(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif type(value) in PLAIN:
        return
    elif isinstance(value, (tuple, list)):
        for element in value:
            _collect_tensors(element, found)
    else:
        for _, element in _list_elements(value):
            _collect_tensors(element, found)


def _list_elements(value: Any) -> Iterator[tuple[Any, Any]]:
    """Lists the elements of a container, each with its key, index or field."""
    if isinstance(value, (tuple, list)):
        yield from enumerate(value)
    elif isinstance(value, Mapping):
        yield from value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            # A declared field need not be set (init=False without a default).
            yield (getattr, field.name), getattr(value, field.name, None)


def _iterate_paths(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif type(value) not in PLAIN:
        for key, element in _list_elements(value):
            yield from _iterate_paths(element, (*path, key))


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
        self._anchor: tuple[torch.device, Origin] | None = None
        self._keeps_sizes = False

    def give_up(self, reason: str) -> None:
        """Remembers why the graph cannot be replayed; the first reason stays."""
        self.reason = self.reason or reason

    def find_origin(self, tensor: torch.Tensor) -> Origin | None:
        """Finds the origin of a tensor of the trace; None for parameters and strangers."""
        return tensor.__dict__.get(_ORIGIN)

    def tag_result(self, result: Any, node: int, fx_node: fx.Node | None) -> None:
        """Marks the tensors in a node's result as coming from it."""
        for path, tensor in _iterate_paths(result, ()):
            if id(tensor) not in self._attributes:
                tensor.__dict__[_ORIGIN] = origin = Origin(node, fx_node, path)
                if self._anchor is None and fx_node is not None and fx_node.op == "placeholder":
                    self._anchor = tensor.device, origin

    def add_call(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str
    ) -> fx.Node:
        """Adds a node that calls a module, function or method."""
        # A Function of the user's own; PyTorch's functions take any tuple for a size.
        self._keeps_sizes = isinstance(getattr(target, "__self__", None), type)
        fx_args = tuple(self._convert(arg, name) for arg in args)
        fx_kwargs = {key: self._convert(arg, name) for key, arg in kwargs.items()}
        return self.graph.create_node(op, target, fx_args, fx_kwargs, name=name)

    def set_output(self, output: Any) -> fx.Node:
        """Adds the output node."""
        self._keeps_sizes = True
        node: fx.Node = self.graph.output(self._convert(output, "the output"))
        return node

    def _convert(self, value: Any, where: str) -> Any:
        """Converts a call's argument to what the graph holds: nodes for tensors and sizes."""
        if isinstance(value, torch.Tensor):
            return self._convert_tensor(value, where)
        if isinstance(value, SizeInt):
            return self._convert_size(value)
        if isinstance(value, torch.device) and self._anchor is not None:
            # A GPU's tensors are fakes on cpu:0, whatever the code sees: kernels/cuda/devices.py.
            device, origin = self._anchor
            if value.type != "cpu" or device.index is None:
                # The graph runs wherever its first input is.
                return self._add_after(self._convert_origin(origin), getattr, "device")
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
        origin = self.find_origin(tensor)
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
        return self._convert_origin(origin)

    def _convert_origin(self, origin: Origin) -> fx.Node:
        node = origin.fx_node
        assert node is not None
        for key in origin.path:
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
        return self._add_after(self._convert_origin(expression.origin), "size", expression.dim)

    def _add_after(self, node: fx.Node, call: Any, argument: Any) -> fx.Node:
        """Adds a call of a function or method next to the node that it asks, each once."""
        step = (node, call, argument)
        if step not in self._made:
            add = self.graph.call_method if isinstance(call, str) else self.graph.call_function
            with self.graph.inserting_after(node):  # not between nodes that it is no part of
                self._made[step] = add(call, (node, argument))
        return self._made[step]


def _is_plain(value: Any) -> bool:
    """Tells whether a list, tuple, dict or dataclass is made again of its elements alone."""
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
