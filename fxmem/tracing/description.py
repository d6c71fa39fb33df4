"""What a model was when it was traced, so that its graph is run for no other."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx, nn
from torch.nn.parameter import is_lazy

_KEY = "fxmem_model"
PLAIN = (type(None), bool, int, float, complex, str, bytes)
"""Types of attributes that are looked at as values."""
INTERNAL = frozenset({*vars(nn.Module()), "_is_torch_compile"})
"""Attributes that every module has, and the one with which ``torch.compile`` marks a module."""

_UNKNOWN = "?"

Description = tuple[tuple[str, object], ...]


def describe_model(model: nn.Module) -> Description:
    """Modules by name with their class, what they hold with its shape, and plain attributes.

    >>> dict(describe_model(nn.Linear(2, 1)))["weight"]
    ((1, 2), 'torch.float32')
    """
    return tuple(_describe(model))


def _describe(model: nn.Module) -> Iterator[tuple[str, object]]:
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        tensors = [*module._parameters.items(), *module._buffers.items()]
        if any(tensor is not None and is_lazy(tensor) for _, tensor in tensors):
            yield name or "the model", _UNKNOWN  # what it is comes with its first input
            continue
        yield name or "the model", type(module).__name__
        for held, tensor in tensors:
            if tensor is not None:
                yield f"{prefix}{held}", (tuple(tensor.shape), str(tensor.dtype))
        for attribute, value in vars(module).items():
            if attribute not in INTERNAL and isinstance(value, PLAIN):
                yield f"{prefix}{attribute}", value


def remember_model(graph: fx.Graph, description: Description) -> None:
    """Keeps with a graph what it was traced from.

    Args:
        graph: Of a model.
        description: Of that model, from :func:`describe_model`.
    """
    for output in graph.find_nodes(op="output"):
        output.meta[_KEY] = description


def recall_model(graph: fx.Graph) -> Description | None:
    """What :func:`remember_model` kept; None for a graph that came another way.

    Args:
        graph: Of a model.
    """
    outputs = graph.find_nodes(op="output")
    found: Description | None = outputs[0].meta.get(_KEY) if outputs else None
    return found


def find_difference(one: Description, other: Description) -> str:
    """What two models differ in first, by name; empty where they are alike.

    >>> small, large = describe_model(nn.Linear(2, 1)), describe_model(nn.Linear(3, 1))
    >>> find_difference(small, large)
    'weight'
    """
    if any(value == _UNKNOWN for _, value in (*one, *other)):
        return ""  # the nodes of the graph have the modules' names
    for mine, theirs in zip(one, other, strict=False):
        if mine[0] != theirs[0] or repr(mine[1]) != repr(theirs[1]):
            return mine[0]
    if len(one) == len(other):
        return ""
    return max(one, other, key=len)[min(len(one), len(other))][0]
