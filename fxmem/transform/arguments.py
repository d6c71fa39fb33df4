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

from fxmem.specs import strip_torch
from fxmem.tracing.calls import bind_arguments
from fxmem.tracing.fxgraph import CONSTANT
from fxmem.tracing.signatures import SIGNATURE, describe_value
from fxmem.transform.settings import is_equal


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


def list_names(model: nn.Module) -> tuple[str, ...] | None:
    """The names of the arguments that ``forward`` takes by position; None where it takes any."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = {parameter.kind for parameter in parameters}
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return None
    keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind not in keyword)


def name_arguments(
    model: nn.Module, names: tuple[str, ...] | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by their names.

    Args:
        model: That is called.
        names: From :func:`list_names`.
        args: As they are given.
        kwargs: Likewise.
    """
    if (
        names is None
        or len(args) > len(names)
        or any(name in kwargs for name in names[: len(args)])
    ):
        return dict(bind_arguments(model, args, kwargs))
    return {**dict(zip(names, args, strict=False)), **kwargs}


def find_mismatch(expected: Sequence[Argument], given: Mapping[str, Any]) -> str:
    """What of a call's arguments the graph was not traced for; empty where it fits."""
    names = [argument.name for argument in expected]
    for argument in expected:
        name = argument.name
        if argument.is_constant:
            if name in given and not is_equal(given[name], argument.constant):
                return f"{name}={given[name]!r}"
        elif name not in given:
            return f"no {name}"
    return ", ".join(name for name in given if name not in names and given[name] is not None)


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
