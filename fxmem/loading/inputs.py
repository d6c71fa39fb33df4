"""Models and inputs, checked before anything runs, and inputs resized along an axis."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_iter, tree_leaves, tree_unflatten

from fxmem.errors import UsageError, suggest_names
from fxmem.fakes.fake_mode import describe_inputs, read_leaf
from fxmem.loading.parsing import shorten_signature
from fxmem.specs import TensorSpec, parse_spec

_SIZE_PASSED = re.compile(r"(\[0\]\[[0-9]+\]=)?(?P<size>[0-9]+)")
_ITEM = re.compile(r"((?P<name>\w+):)?(?P<dim>[0-9]+)")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
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
                hint = suggest_names(name, by_name, f"it takes {', '.join(by_name)}")
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


@dataclass(frozen=True, slots=True)
class Axis:
    """Dimensions of inputs that have one size and change together."""

    size: int
    dims: Mapping[int, tuple[int, ...]]  # by the number of the input among the flattened ones
    label: str  # "dimension 0 of ids, mask"


def find_axis(args: Any, kwargs: Any, axis: str | int | None = None) -> Axis:
    """Finds the dimensions of the inputs that an axis stands for.

    Args:
        args: Positional inputs.
        kwargs: Keyword inputs.
        axis: Numbers of dimensions, joined by commas: of the first input that has such a
            dimension, and of all others of that size there; or of the named inputs alone, as in
            ``"ids:1,mask:1"``. A positional input has its number for a name: ``"0:1"``. None for
            dimension 0, the batch.

    Raises:
        UsageError: There is no such dimension, or several sizes.

    >>> find_axis((), {"ids": "4x128:int64", "mask": "4x128", "scale": "1"}, 1).label
    'dimension 1 of ids, mask'
    >>> find_axis("8x3x224x224", None, "2,3").dims
    {0: (2, 3)}
    """
    positional, named = gather_inputs(args, kwargs)
    inputs = {str(at): value for at, value in enumerate(positional)} | named
    shapes: list[tuple[str, tuple[int, ...]]] = []  # of every leaf, () for what is no tensor
    for name, value in inputs.items():
        for leaf in map(read_leaf, tree_leaves(value)):
            shape = tuple(leaf.shape) if isinstance(leaf, Tensor | TensorSpec) else ()
            shapes.append((name, shape))
    if not shapes:
        raise UsageError("no inputs are given", hint="one of them at least has the size to vary")
    dims: dict[int, tuple[int, ...]] = {}
    for item in str(0 if axis is None else axis).split(","):
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            raise UsageError(f"bad axis {item!r}", hint="1, or 2,3, or ids:1 for one input")
        if match["name"] and match["name"] not in inputs:
            raise UsageError(f"no input is called {match['name']!r}", hint=", ".join(inputs))
        dim = int(match["dim"])
        found = {
            at: shape[dim]
            for at, (name, shape) in enumerate(shapes)
            if len(shape) > dim and match["name"] in (None, name)
        }
        if not found:
            raise UsageError(f"no input has a dimension {item.strip()}", hint="0 is the first")
        first = next(iter(found.values()))
        for at in found if match["name"] else [at for at in found if found[at] == first]:
            dims[at] = (*dims.get(at, ()), dim)
    sizes = {shapes[at][1][dim] for at, each in dims.items() for dim in each}
    if len(sizes) > 1:
        raise UsageError(
            f"the sizes along the axis differ: {', '.join(map(str, sorted(sizes)))}",
            hint="name dimensions of one size",
        )
    if 0 in sizes:
        raise UsageError("the inputs are empty along the axis", hint="give a size of 1 or more")
    numbers = sorted({dim for each in dims.values() for dim in each})
    names = dict.fromkeys(shapes[at][0] for at in sorted(dims))
    of = ", ".join(f"input {name}" if name.isdecimal() else name for name in names)
    label = f"dimension{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))} of {of}"
    return Axis(sizes.pop(), dims, label)


def resize_inputs(args: Any, kwargs: Any, axis: Axis, size: int) -> Inputs:
    """Gives inputs another size along an axis.

    A tensor on the CPU keeps its values as far as they go if it does not grow, or holds integers
    such as the lengths of sequences; other tensors become specs.
    """
    leaves, structure = tree_flatten(gather_inputs(args, kwargs))
    done: dict[int, Any] = {}  # by the tensor: one that is given twice stays one
    for at, dims in axis.dims.items():
        leaf: Any = read_leaf(leaves[at])  # a new spec for each text
        if id(leaf) not in done:
            done[id(leaf)] = _resize(leaf, dims, size)
        leaves[at] = done[id(leaf)]
    inputs: Inputs = tree_unflatten(leaves, structure)
    return inputs


def _resize(leaf: Tensor | TensorSpec, dims: tuple[int, ...], size: int) -> Tensor | TensorSpec:
    shape = tuple(size if dim in dims else old for dim, old in enumerate(leaf.shape))
    is_small = size <= leaf.shape[dims[0]] or "int" in str(leaf.dtype)
    if type(leaf) is Tensor and leaf.device.type == "cpu" and is_small:
        with torch.inference_mode(False), torch.no_grad():  # known values stay known
            for dim in dims:
                kept = torch.arange(size) % leaf.shape[dim]
                leaf = leaf.detach().index_select(dim, kept).requires_grad_(leaf.requires_grad)
        return leaf
    requires_grad = leaf.requires_grad
    spec = parse_spec(*describe_inputs([leaf], {})) if isinstance(leaf, Tensor) else leaf
    return replace(spec, shape=shape, requires_grad=requires_grad)
