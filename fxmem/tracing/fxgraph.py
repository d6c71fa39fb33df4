"""Building the FX graph: which node made a tensor, and arguments as the graph wants them."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from fxmem.tracing.rebuilding import is_plain_container, is_plain_dataclass
from fxmem.tracing.sizes import Arithmetic, Dim, SizeInt

NODE = "fxmem_node"
"""Key of an FX node's ``meta``: the name of the traced node that it is."""
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
    """Where a tensor comes from: a node, and the way to it in that node's result.

    Kept as an attribute of the tensor object, so that it goes when the tensor goes and holds
    nothing alive.

    Attributes:
        node: Index of the traced node.
        fx_node: The node of the FX graph; None for what the loss function makes.
        path: Keys and indices into the node's result.
    """

    node: int
    fx_node: fx.Node | None
    path: tuple[Any, ...] = ()


def iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value, through lists, tuples, dicts and dataclasses."""
    return (tensor for _, tensor in _iterate_paths(value, ()))


def _iterate_paths(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for i, element in enumerate(value):
            yield from _iterate_paths(element, (*path, i))
    elif isinstance(value, Mapping):
        for key, element in value.items():
            yield from _iterate_paths(element, (*path, key))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            # A declared field need not be set (init=False without a default).
            element = getattr(value, field.name, None)
            yield from _iterate_paths(element, (*path, (getattr, field.name)))


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
    """How the FX graph calls what a ``TorchFunctionMode`` saw.

    Returns:
        The op (``call_function`` or ``call_method``), the target, and the name for a reader.

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
    """An FX graph under construction.

    Args:
        model: The module whose parameters, buffers and submodules the graph refers to.

    Attributes:
        graph: The graph so far.
        reason: The first thing that the graph cannot express; empty while there is none.
    """

    def __init__(self, model: nn.Module) -> None:
        self.reason = ""
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

    # -- origins -------------------------------------------------------------------------------

    def find_origin(self, tensor: torch.Tensor) -> Origin | None:
        """Where a tensor of the trace comes from; None for parameters and strangers."""
        return tensor.__dict__.get(_ORIGIN)

    def find_inputs(self, arguments: Any) -> tuple[int, ...]:
        """Indices of the nodes that a call takes its tensors from, each once, in order."""
        origins = (self.find_origin(tensor) for tensor in iterate_tensors(arguments))
        return tuple(dict.fromkeys(origin.node for origin in origins if origin))

    def tag_result(self, result: Any, node: int, fx_node: fx.Node | None) -> None:
        """Marks the tensors in a node's result as coming from it."""
        for path, tensor in _iterate_paths(result, ()):
            if id(tensor) not in self._attributes:
                tensor.__dict__[_ORIGIN] = origin = Origin(node, fx_node, path)
                if self._anchor is None and fx_node is not None and fx_node.op == "placeholder":
                    self._anchor = tensor.device, origin

    # -- nodes ---------------------------------------------------------------------------------

    def add_placeholder(self, name: str) -> fx.Node:
        """A placeholder node."""
        return self.graph.placeholder(name)

    def add_call(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str
    ) -> fx.Node:
        """A node that calls a module, function or method."""
        # A Function of the user's own; PyTorch's functions take any tuple for a size.
        self._keeps_sizes = isinstance(getattr(target, "__self__", None), type)
        fx_args = tuple(self._convert(arg, name) for arg in args)
        fx_kwargs = {key: self._convert(arg, name) for key, arg in kwargs.items()}
        return self.graph.create_node(op, target, fx_args, fx_kwargs, name=name)

    def set_output(self, output: Any) -> None:
        """The output node."""
        self._keeps_sizes = True
        self.graph.output(self._convert(output, "the output"))

    def _convert(self, value: Any, where: str) -> Any:
        """A call's argument as the graph holds it: nodes for tensors and sizes."""
        if isinstance(value, torch.Tensor):
            return self._convert_tensor(value, where)
        if isinstance(value, SizeInt):
            return self._convert_size(value)
        if isinstance(value, torch.device) and self._anchor is not None:
            # A GPU's tensors are fakes on cpu:0, whatever the code sees: lowering/cuda/devices.py.
            on_host = self._anchor[0].index is None
            if value.type != "cpu" or on_host:
                return self._convert_device(self._anchor[1])
        if isinstance(value, _CONSTANTS):
            return value
        if isinstance(value, (tuple, list)):
            return self._convert_sequence(value, where)
        if isinstance(value, slice):
            return slice(*(self._convert(e, where) for e in (value.start, value.stop, value.step)))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._convert_dataclass(value, where)
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return self._convert_dict(value, where)
        if isinstance(value, numbers.Integral):  # numpy's
            return int(value)
        return self._refuse(value, where)

    def _refuse(self, value: Any, where: str) -> str:
        self.give_up(f"no graph holds the {type(value).__name__} in {where}")
        return f"<{type(value).__name__}>"

    def _convert_sequence(self, value: Any, where: str) -> Any:
        kind: Any = type(value)
        elements = [self._convert(element, where) for element in value]
        if hasattr(kind, "n_sequence_fields"):  # a named tuple of C, as torch.max returns
            return self.graph.call_function(kind, (tuple(elements),))
        if kind is torch.Size:
            keeps = self._keeps_sizes
            return self.graph.call_function(kind, (elements,)) if keeps else tuple(elements)
        if not is_plain_container(value):
            return self._refuse(value, where)
        if hasattr(kind, "_fields"):  # a named tuple
            return self.graph.call_function(kind, tuple(elements))
        plain = elements if isinstance(value, list) else tuple(elements)
        return plain if type(plain) is kind else self.graph.call_function(kind, (plain,))

    def _convert_dict(self, value: dict[str, Any], where: str) -> Any:
        if not is_plain_container(value):
            return self._refuse(value, where)
        elements = {key: self._convert(element, where) for key, element in value.items()}
        is_dict = type(value) is dict
        return elements if is_dict else self.graph.call_function(type(value), (elements,))

    def _convert_dataclass(self, value: Any, where: str) -> Any:
        if not is_plain_dataclass(value):
            return self._refuse(value, where)
        given = [field.name for field in dataclasses.fields(value) if field.init]
        fields = {name: self._convert(getattr(value, name), where) for name in given}
        return self.graph.call_function(type(value), (), fields)

    def _convert_tensor(self, tensor: torch.Tensor, where: str) -> Any:
        attribute = self._attributes.get(id(tensor))
        origin = self.find_origin(tensor)
        if attribute is None and origin is None:
            attribute = self._find_plain_attribute(tensor)
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
            step = (node, key)
            if step not in self._made:
                call = getattr if isinstance(key, tuple) and key[0] is getattr else operator.getitem
                argument = key[1] if call is getattr else key
                with self.graph.inserting_after(node):
                    self._made[step] = self.graph.call_function(call, (node, argument))
            node = self._made[step]
        return node

    def _convert_device(self, origin: Origin) -> fx.Node:
        """The device of the first input: the graph runs wherever its inputs are."""
        if _DEVICE not in self._made:
            tensor = self._convert_origin(origin)
            with self.graph.inserting_after(tensor):  # and not between nodes that it is no part of
                self._made[_DEVICE] = self.graph.call_function(getattr, (tensor, "device"))
        return self._made[_DEVICE]

    def _convert_size(self, size: SizeInt) -> Any:
        expression = size.expression
        if isinstance(expression, Arithmetic):
            arguments = tuple(
                self._convert_size(a) if isinstance(a, SizeInt) else a for a in expression.arguments
            )
            return self.graph.call_function(expression.function, arguments)
        return self._convert_dim(expression)

    def _convert_dim(self, expression: Dim) -> fx.Node:
        tensor = self._convert_origin(expression.origin)
        step = (tensor, "size", expression.dim)
        if step not in self._made:
            with self.graph.inserting_after(tensor):
                self._made[step] = self.graph.call_method("size", (tensor, expression.dim))
        return self._made[step]

    def _find_plain_attribute(self, tensor: torch.Tensor) -> str | None:
        """The name of a tensor that a module keeps without having registered it."""
        for prefix, module in self._model.named_modules():
            for name, value in vars(module).items():
                if value is tensor:
                    return f"{prefix}.{name}".strip(".")
        return None
