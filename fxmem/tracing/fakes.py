"""The user's model and inputs, copied to fake CPU tensors that take no memory.

A fake tensor has a shape, a dtype, strides and a storage with a size, and no data. Whatever the
user gives - real, meta or fake tensors, on any device - becomes fake *CPU* tensors: fake tensors
on an accelerator abort the process where torch was built without it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_iter, tree_map

from fxmem.errors import TraceError, UsageError
from fxmem.specs import TensorSpec, parse_spec, strip_torch
from fxmem.tracing.tensor_copier import TensorCopier, find_spans


def make_fake_mode() -> FakeTensorMode:
    """A mode for one analysis: all its fakes belong to it.

    Real tensors that the model makes on its way (from numpy, or held in a closure) may be mixed
    in, and become fakes.

    >>> with make_fake_mode():
    ...     torch.empty(2, 3)
    FakeTensor(..., size=(2, 3))
    """
    return _LeanFakeMode(allow_non_fake_inputs=True)


class _LeanFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Without the wrappers that keep torch.compile out of each operator: nothing is compiled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    __torch_dispatch__ = inspect.unwrap(FakeTensorMode.__torch_dispatch__)


def make_fake_inputs(
    args: Sequence[object],
    kwargs: Mapping[str, object],
    fake_mode: FakeTensorMode,
    *,
    dtype: str | None = None,
    fakes: dict[int, Tensor] | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs as fresh fake CPU tensors, in the lists, tuples and dicts they came in.

    A tensor keeps its strides and ``requires_grad``; one passed twice stays one, and two on one
    storage share it, cut to the part that they cover. A :class:`TensorSpec`, or a text that
    starts as one (a digit, or ``scalar``), becomes a tensor; other texts and numbers stay as they
    are, as does any other object.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        fake_mode: The mode that the fakes belong to.
        dtype: Name of a dtype that floating tensors are cast to.
        fakes: Fakes that were made before, by the ids of their originals: of a tensor that the
            model holds, too. Gets those of the inputs.

    Raises:
        UsageError: A text starts like a spec and is none, or the dtype is not a floating one.

    >>> make_fake_inputs(["2x3", "mean"], {"mask": None}, make_fake_mode())
    ((FakeTensor(..., size=(2, 3)), 'mean'), {'mask': None})
    """
    cast_to = find_dtype(dtype)
    copier = TensorCopier(fake_mode, find_spans(tree_iter((args, kwargs))))
    fakes = {} if fakes is None else fakes
    own: dict[int, Tensor] = {}

    def convert(leaf: object) -> object:
        leaf = read_leaf(leaf)
        if isinstance(leaf, TensorSpec):
            return copier.create(leaf, cast_to)
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in own:
            held = fakes.get(id(leaf)) if cast_to is None else None
            own[id(leaf)] = copier.copy(leaf, cast_to) if held is None else held
        return own[id(leaf)]

    inputs: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(convert, (tuple(args), dict(kwargs)))
    for key, fake in own.items():
        fakes.setdefault(key, fake)
    return inputs


def describe_inputs(args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[str, ...]:
    """The inputs as the texts that ``--input`` takes; the leaves of nested ones with their path.

    >>> describe_inputs([TensorSpec((8, 3))], {"ids": torch.zeros(1, 4, dtype=torch.int64)})
    ('8x3:float32', 'ids=1x4:int64')
    """
    texts = []
    for index, value in enumerate(args):
        for path, leaf in tree_flatten_with_path(value)[0]:
            texts.append((f"[{index}]{keystr(path)}=" if path else "") + _describe_leaf(leaf))
    for name, value in kwargs.items():
        for path, leaf in tree_flatten_with_path(value)[0]:
            texts.append(f"{name}{keystr(path)}={_describe_leaf(leaf)}")
    return tuple(texts)


_STARTS_LIKE_SPEC = re.compile(r"\s*(-?[0-9]|scalar\b)")


def read_leaf(leaf: object) -> object:
    """An input that is a text like a spec as the spec; anything else as it is.

    Raises:
        UsageError: The text starts like a spec and is none.

    >>> read_leaf("2x3"), read_leaf("mean")
    (TensorSpec(shape=(2, 3), dtype='float32', requires_grad=False, memory_format=''), 'mean')
    """
    if isinstance(leaf, str) and _STARTS_LIKE_SPEC.match(leaf):
        return parse_spec(leaf)
    return leaf


def _describe_leaf(leaf: object) -> str:
    leaf = read_leaf(leaf)
    if isinstance(leaf, Tensor):
        dtype = strip_torch(leaf.dtype)
        return str(TensorSpec(tuple(leaf.shape), dtype, memory_format=_name_format(leaf)))
    if isinstance(leaf, TensorSpec):
        return str(leaf)
    is_plain = leaf is None or isinstance(leaf, bool | int | float | complex | str)
    return repr(leaf) if is_plain else type(leaf).__name__


def _name_format(tensor: Tensor) -> str:
    """The memory format that a spec names: none for what is contiguous, or in neither."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return ""
    for dims, name in ((4, "channels_last"), (5, "channels_last_3d")):
        if tensor.dim() == dims and tensor.is_contiguous(memory_format=getattr(torch, name)):
            return name
    return ""


def find_dtype(name: str | None) -> torch.dtype | None:
    """The dtype that a model is cast to; None for none.

    Raises:
        UsageError: It is not a floating one.
    """
    dtype = getattr(torch, name) if name else None
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(
            f"a model cannot be cast to {name}", hint="float32, bfloat16, float16 or float64"
        )
    return dtype


def refuse_compiled(model: nn.Module) -> None:
    """Checks that the model's Python code is what would run.

    Raises:
        TraceError: It is compiled.
    """
    for name, module in model.named_modules():
        subject = f"{name!r}" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise TraceError(
                f"{subject} is TorchScript, which does not run on fake tensors",
                hint="pass the module that was scripted",
            )
        is_wrapper = type(module).__module__.startswith("torch._dynamo")
        if is_wrapper or module._compiled_call_impl is not None:
            raise TraceError(
                f"{subject} is compiled: what a compiler allocates is not analysed",
                hint="pass the module as it was before torch.compile",
            )
