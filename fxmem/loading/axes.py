"""Axes of inputs: dimensions that share one size, such as the batch, and are resized together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fxmem.errors import UsageError
from fxmem.fakes.fake_mode import describe_inputs, read_leaf
from fxmem.loading.inputs import gather_inputs
from fxmem.specs import TensorSpec, parse_spec

_ITEM = re.compile(r"((?P<name>\w+):)?(?P<dim>[0-9]+)")

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


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
