"""The arguments of a call of a planned model, and what its graph was traced for.

Written in words that compilers follow: they look into each call.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fxmem.applying.settings import is_equal
from fxmem.specs import strip_torch
from fxmem.tracing.calls import bind_arguments
from fxmem.tracing.description import PLAIN
from fxmem.tracing.fxgraph import CONSTANT
from fxmem.tracing.signatures import SIGNATURE, describe_value


@dataclass(frozen=True, slots=True)
class Argument:
    """What the graph takes; a constant was traced as what it is, all else by its signature."""

    name: str
    is_constant: bool
    constant: Any = None
    signature: Any = None


def list_expected(nodes: Iterable[fx.Node]) -> tuple[Argument, ...]:
    """The arguments that a graph takes."""
    return tuple(
        Argument(
            str(node.target),
            CONSTANT in node.meta,
            node.meta.get(CONSTANT),
            node.meta.get(SIGNATURE),
        )
        for node in nodes
        if node.op == "placeholder"
    )


@dataclass(frozen=True, slots=True)
class Parameters:
    """What ``forward`` takes.

    Attributes:
        positions: The names of what it takes by position; None where it takes any number, or has no
            signature.
        names: All that it names.
        defaults: What it takes for what is not given.
    """

    positions: tuple[str, ...] | None
    names: frozenset[str]
    defaults: Mapping[str, Any]


def list_parameters(model: nn.Module) -> Parameters:
    """What the ``forward`` of a model takes."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return Parameters(None, frozenset(), {})
    keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    positions = tuple(each.name for each in parameters if each.kind not in keyword)
    takes_any = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters)
    many = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return Parameters(
        None if takes_any else positions,
        frozenset(each.name for each in parameters if each.kind not in many),
        {e.name: e.default for e in parameters if e.default is not inspect.Parameter.empty},
    )


def name_arguments(
    model: nn.Module, taken: Parameters, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by their names.

    Args:
        model: That is called.
        taken: What it takes.
        args: As they are given.
        kwargs: Likewise.
    """
    names = taken.positions
    if (
        names is None
        or len(args) > len(names)
        or any(name in kwargs for name in names[: len(args)])
    ):
        return dict(bind_arguments(model, args, kwargs))
    return {**dict(zip(names, args, strict=False)), **kwargs}


def find_mismatch(expected: Sequence[Argument], taken: Parameters, given: Mapping[str, Any]) -> str:
    """What of a call's arguments the graph was not traced for; empty where it fits.

    Args:
        expected: By the graph.
        taken: By the model.
        given: By their names.
    """
    for argument in expected:
        name = argument.name
        if name not in given and not (argument.is_constant and name in taken.defaults):
            return f"no {name}"
        if argument.is_constant:
            value = given[name] if name in given else taken.defaults[name]
            if not is_equal(value, argument.constant):
                return f"{name}={value!r}"
    names = [argument.name for argument in expected]
    others = [name for name in given if name not in names and not _is_default(taken, given, name)]
    if others:
        return ", ".join(others)
    # Code may go through arguments that it does not name in the order that they come in.
    unnamed = [name for name in given if name in names and name not in taken.names]
    if unnamed != [name for name in names if name not in taken.names]:
        return "in another order: " + ", ".join(unnamed)
    return ""


def _is_default(taken: Parameters, given: Mapping[str, Any], name: str) -> bool:
    if name not in taken.defaults:
        return False
    value, default = given[name], taken.defaults[name]
    return value is default or (isinstance(default, PLAIN) and is_equal(value, default))


def write_difference(expected: Sequence[Argument], given: Mapping[str, Any]) -> tuple[str, str]:
    """In what arguments are not as a graph was traced for, and what they are.

    >>> traced = Argument("x", False, signature=describe_value(torch.ones(2)))
    >>> write_difference([traced], {"x": torch.ones(3)})
    ('of these sizes', 'x 3')
    >>> write_difference([traced], {"x": torch.ones(2, dtype=torch.float64)})
    ('of these dtypes', 'x 2:float64')
    >>> write_difference([traced], {"x": torch.ones(2).requires_grad_()})
    ('like these', 'x 2')
    """
    taken = [argument for argument in expected if not argument.is_constant]
    before = [*_list_tensors(tuple(argument.signature for argument in taken))]
    now = [*_list_tensors(tuple(describe_value(given[argument.name]) for argument in taken))]
    differs = [
        name
        for at, name in enumerate(("sizes", "dtypes"))
        if [tensor[at] for tensor in before] != [tensor[at] for tensor in now]
    ]
    tensors = {n: value for n, value in given.items() if isinstance(value, torch.Tensor)}
    written = []
    for name, tensor in tensors.items():
        size = "x".join(map(str, tensor.shape))
        dtype = f":{strip_torch(tensor.dtype)}" if "dtypes" in differs else ""
        written.append(f"{name} {size}{dtype}")
    what = f"of these {' and '.join(differs)}" if differs else "like these"
    return what, ", ".join(written) or ", ".join(given)


def _list_tensors(description: Any) -> Iterator[tuple[Any, ...]]:
    """What describes tensors in a description of values."""
    if isinstance(description, tuple):
        is_tensor = len(description) == 4 and isinstance(description[1], torch.dtype)
        if is_tensor and isinstance(description[0], tuple):
            yield description
        else:
            for held in description:
                yield from _list_tensors(held)
