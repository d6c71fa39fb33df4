"""The same step with one thing changed, to be analysed again."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fxmem.analysis import Analysis
from fxmem.fakes.fake_mode import read_leaf
from fxmem.loading.axes import find_axis, resize_inputs
from fxmem.loading.inputs import gather_inputs
from fxmem.loading.parsing import is_target
from fxmem.planning.model.index import is_batch_norm
from fxmem.specs import TensorSpec
from fxmem.training.optimizers import OPTIMIZERS, parse_settings

_IMPLEMENTATIONS = {
    "foreach": (
        "FX203",
        "Update one parameter at a time",
        "Slower: the optimizer runs its kernels for one parameter at a time.",
    ),
    "fused": (
        "FX204",
        "Update parameters in one kernel, without temporaries",
        "None in time; the last digits of an update may differ.",
    ),
}
"""By the option of an optimizer, the code and text of the change that it makes, and the cost."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A step with one thing changed; code and texts are as in :class:`Finding`.

    Attributes:
        options: The options of :func:`fxmem.analyze` that differ.
        inputs: Other inputs, positional and named; None for the same.
    """

    code: str
    change: str
    option: str
    cost: str
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None


def list_variants(
    analysis: Analysis, args: Any, kwargs: Any, options: Mapping[str, Any]
) -> Iterator[Variant]:
    """Lists the changes to try, without what the user's options have already."""
    setup = analysis.setup
    if options.get("autocast") is None:
        subject = "forward and loss" if setup.mode == "train" else "the model"
        yield Variant(
            code="FX301",
            change=f'Run {subject} under torch.autocast("{setup.device}", torch.bfloat16)',
            option='autocast="bf16"',
            cost="Numerics change: products and convolutions are rounded to bfloat16's 8 bits.",
            options={"autocast": "bf16"},
        )
    if setup.mode != "train":
        return
    if not setup.loop.set_to_none:
        yield Variant(
            code="FX202",
            change="Free gradients instead of filling them with zeros",
            option="optimizer.zero_grad(set_to_none=True)",
            cost="None, as long as no code reads .grad after zero_grad; parameters that got no "
            "gradient are passed over by the optimizer.",
            options={"set_to_none": True},
        )
    optimizer = options.get("optimizer")
    if isinstance(optimizer, str) and not is_target(optimizer):
        yield from _list_optimizers(optimizer)
    halved = halve_inputs(args, kwargs) if setup.loop.accumulate == 1 else None
    if halved is not None:
        cost = "Slower: kernels run on half as much at a time."
        cost += " Divide the loss by 2 where it is a mean."
        if any(map(is_batch_norm, analysis.graph.operations)):
            cost += " Batch normalisation takes its statistics of half the batch."
        yield Variant(
            code="FX302",
            change="Split the batch into 2 micro-batches, each moved to the device by itself, and "
            "add up their gradients",
            option="accumulate=2 with half the batch",
            cost=cost,
            options={"accumulate": 2},
            inputs=halved,
        )


def _list_optimizers(optimizer: str) -> Iterator[Variant]:
    """Lists the optimizer without lists of all parameters, and with a kernel of its own."""
    name, settings = parse_settings(optimizer)
    make = OPTIMIZERS[name]
    accepted = inspect.signature(make).parameters
    kept = {key: value for key, value in settings.items() if key not in ("foreach", "fused")}
    own_name = getattr(make, "func", make).__name__
    for key, value in (("foreach", False), ("fused", True)):
        if key in accepted and settings.get(key) is not value and settings.get("fused") is not True:
            code, change, cost = _IMPLEMENTATIONS[key]
            text = ", ".join(f"{k}={v!r}" for k, v in {**kept, key: value}.items())
            option = f"{own_name}(..., {key}={value})"
            yield Variant(code, change, option, cost, {"optimizer": f"{name}({text})"})


def halve_inputs(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Halves the first size of all input tensors; None where it is not one even number.

    >>> halve_inputs(("8x3", 0.5), {"y": "8:int64"})[0]
    (TensorSpec(shape=(4, 3), dtype='float32', requires_grad=False, memory_format=''), 0.5)
    >>> halve_inputs(("8x3", "4x3"), None) is None
    True
    """
    leaves = [read_leaf(leaf) for leaf in tree_leaves(gather_inputs(args, kwargs))]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor | TensorSpec)]
    sizes = {leaf.shape[0] if len(leaf.shape) else 0 for leaf in tensors}
    if len(sizes) != 1 or min(sizes) == 0 or min(sizes) % 2:
        return None
    if any(isinstance(leaf, Tensor) and leaf.layout is not torch.strided for leaf in tensors):
        return None
    return resize_inputs(args, kwargs, find_axis(args, kwargs), min(sizes) // 2)
