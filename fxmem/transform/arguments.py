"""The arguments of a call of a planned model, and what its graph was traced for.

Written in words that compilers follow: they look into each call.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fxmem.tracing.calls import bind_arguments
from fxmem.tracing.fxgraph import CONSTANT
from fxmem.tracing.signatures import SIGNATURE
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


def write_sizes(given: Mapping[str, Any]) -> str:
    """The sizes of the tensors among a call's arguments; their names where there is none."""
    tensors = [
        f"{name} {'x'.join(map(str, value.shape))}"
        for name, value in given.items()
        if isinstance(value, torch.Tensor)
    ]
    return ", ".join(tensors) or ", ".join(given)
