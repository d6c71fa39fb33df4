"""Checks of models and inputs from Python or the command line, before anything runs."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils._pytree import tree_iter

from fxmem.errors import UsageError
from fxmem.loading.parsing import shorten_signature

_ONE_EACH = "one input for each argument without a default"


def check_model(model: object) -> None:
    """Checks that something is a module that can be called.

    Raises:
        UsageError: It is a class, no module, or one without a ``forward``.
    """
    if isinstance(model, type):
        raise UsageError(
            f"the model is the class {model.__name__}, not an instance of it",
            hint=f"pass {model.__name__}(...)",
        )
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model must be an nn.Module, got {type(model).__name__}",
            hint="pass a module, or name one: 'path/to/file.py:Model'",
        )
    name = type(model).__name__
    if "_modules" not in vars(model):
        raise UsageError(
            f"{name}.__init__ does not call the one of nn.Module",
            hint="begin it with super().__init__()",
        )
    if getattr(model.forward, "__func__", None) is nn.Module.forward:
        raise UsageError(
            f"{name} has no method forward",
            hint="define forward(self, ...) in it; of a ModuleList, call the modules one by one",
        )


def gather_inputs(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gathers inputs as :func:`torch.export.export` takes them; a single one needs no tuple.

    Raises:
        UsageError: They are of a type that no forward takes, or not where they belong.
    """
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise UsageError(
            f"kwargs must be a dict, got {type(kwargs).__name__}",
            hint="positional inputs are a tuple: args=('8x3', '8x4')",
        )
    args = tuple(args) if isinstance(args, tuple | list) else (args,)
    for leaf in tree_iter((args, dict(kwargs or {}))):
        if type(leaf).__name__ == "ndarray":
            raise UsageError(
                "an input is a NumPy array", hint="pass torch.from_numpy(array), or '8x3:float32'"
            )
    return args, dict(kwargs or {})


def check_inputs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks the inputs against the arguments of ``forward``.

    Raises:
        UsageError: They do not fit; names what is missing, unknown or too much.
    """
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # built in, and does not say
        return
    try:
        signature.bind(*args, **kwargs)
        fits = not _is_dict_of_inputs(signature, args)
    except TypeError:
        fits = False
    if not fits:
        cause, hint = _explain_misfit(signature, args, kwargs)
        forward = f"{type(model).__name__}.forward{shorten_signature(signature)}"
        raise UsageError(f"{cause} {forward}", hint=hint)


def _is_dict_of_inputs(signature: inspect.Signature, args: Sequence[Any]) -> bool:
    """Returns whether the only input is a dict of arguments of ``forward``."""
    is_dict = len(args) == 1 and isinstance(args[0], Mapping) and bool(args[0])
    return is_dict and {*args[0]} <= {*signature.parameters}


def _explain_misfit(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, str]:
    """Words the cause, up to the signature that follows it, and the hint."""
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    by_position = [name for name, kind in kinds.items() if kind in _POSITIONAL]
    by_name = [name for name, kind in kinds.items() if kind in _NAMED]
    if inspect.Parameter.VAR_KEYWORD not in kinds.values():
        for name in kwargs:
            if name not in by_name:
                close = difflib.get_close_matches(name, by_name, n=1)
                hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(by_name)}"
                return f"there is no argument {name!r} in", hint
    if _is_dict_of_inputs(signature, args):
        return "inputs by name were passed by position to", "pass the dict as kwargs"
    if len(args) > len(by_position) and inspect.Parameter.VAR_POSITIONAL not in kinds.values():
        return f"{len(args)} inputs are too many for", suggest_shape(args) or _ONE_EACH
    twice = [name for name in by_position[: len(args)] if name in kwargs]
    if twice:
        return f"{twice[0]!r} is given by position and by name to", "each input once"
    missing = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
        and name not in kwargs
        and name not in by_position[: len(args)]
    ]
    return f"missing input {', '.join(map(repr, missing))} of", _ONE_EACH


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def suggest_shape(inputs: Sequence[object]) -> str:
    """Finds the shape that somebody meant who passed its sizes as inputs; else the empty text.

    >>> suggest_shape((8, 3, 224, 224)), suggest_shape(("[0][0]=4", "[0][1]=8"))
    ("a shape is one text: '8x3x224x224'", "a shape is one text: '4x8'")
    """
    matches = [_SIZE_PASSED.fullmatch(str(value)) for value in inputs]
    sizes = [match["size"] for match in matches if match]
    if not sizes or len(sizes) < len(matches):
        return ""
    return f"a shape is one text: '{'x'.join(sizes)}'"


_SIZE_PASSED = re.compile(r"(\[0\]\[[0-9]+\]=)?(?P<size>[0-9]+)")
