"""The user's model and inputs, copied to fake CPU tensors that take no memory.

A fake tensor has a shape, a dtype, strides and a storage with a size, and no data. Whatever the
user gives - real, meta or fake tensors, on any device - becomes fake *CPU* tensors: fake tensors
on an accelerator abort the process where torch was built without it.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_iter, tree_map

from fxmem.errors import TraceError, UsageError
from fxmem.specs import TensorSpec, parse_spec
from fxmem.tracing.lazy import bind_lazy, copy_lazy
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


def make_fake_model(
    model: nn.Module, fake_mode: FakeTensorMode, *, dtype: str | None = None, train: bool
) -> nn.Module:
    """A copy of the model on fake CPU tensors; the model itself is left alone.

    Tensors that share a storage share one in the copy. Gradients and hooks on tensors are not
    copied, hooks on modules are. A one-element CPU buffer keeps its value, so that ``.item()``
    on it works; no other values are known. A tensor that was computed with gradients and kept
    on a module (as by ``torch.nn.utils.weight_norm``) is copied without its history.

    Args:
        model: Its tensors real, meta or fake, on any device.
        fake_mode: The mode that the fakes belong to.
        dtype: Name of a dtype that floating parameters and buffers are cast to, as by
            ``model.to(dtype)``.
        train: Whether the copy is in training mode.

    Returns:
        The copy; or, where it cannot be copied and all its tensors already belong to
        ``fake_mode`` (it was built for this analysis), the model itself.

    Raises:
        TraceError: The model cannot be copied.
        UsageError: The dtype is not a floating one.

    >>> fake = make_fake_model(nn.Linear(3, 2), make_fake_mode(), dtype="bfloat16", train=True)
    >>> fake.weight.shape, fake.weight.dtype
    (torch.Size([2, 3]), torch.bfloat16)
    """
    cast_to = _find_dtype(dtype)
    _refuse_compiled(model)
    copier = TensorCopier(fake_mode)
    memo = _copy_registered(model, copier, cast_to)
    try:
        with _DeepCopyMode(copier):
            fake = copy.deepcopy(model, memo)
    except Exception as error:
        if not _belongs_to(model, fake_mode):
            raise _explain_failed_copy(model, copier, memo, error) from error
        fake = model
        _replace_registered(fake, memo)
    bind_lazy(fake, fake_mode)
    return fake.train(train)


def make_fake_inputs(
    args: Sequence[object],
    kwargs: Mapping[str, object],
    fake_mode: FakeTensorMode,
    *,
    dtype: str | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs as fresh fake CPU tensors, in the lists, tuples and dicts they came in.

    A tensor keeps its strides and ``requires_grad``; one passed twice stays one, and two on one
    storage share it, cut to the part that they cover. A :class:`TensorSpec`, or a text that
    starts as one (a digit, or ``scalar``), becomes a tensor; every other leaf, other texts
    included, stays as it is.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        fake_mode: The mode that the fakes belong to.
        dtype: Name of a dtype that floating tensors are cast to.

    Raises:
        UsageError: A text starts like a spec and is none, or the dtype is not a floating one.

    >>> make_fake_inputs(["2x3", "mean"], {"mask": None}, make_fake_mode())
    ((FakeTensor(..., size=(2, 3)), 'mean'), {'mask': None})
    """
    cast_to = _find_dtype(dtype)
    copier = TensorCopier(fake_mode, find_spans(tree_iter((args, kwargs))))
    memo: dict[int, Tensor] = {}

    def convert(leaf: object) -> object:
        if isinstance(leaf, str) and _STARTS_LIKE_SPEC.match(leaf):
            leaf = parse_spec(leaf)
        if isinstance(leaf, TensorSpec):
            return copier.create(leaf, cast_to)
        if isinstance(leaf, Tensor):
            if id(leaf) not in memo:
                memo[id(leaf)] = copier.copy(leaf, cast_to)
            return memo[id(leaf)]
        return leaf

    return tree_map(convert, tuple(args)), tree_map(convert, dict(kwargs))


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


_STARTS_LIKE_SPEC = re.compile(r"\s*([0-9]|scalar\b)")


def _describe_leaf(leaf: object) -> str:
    if isinstance(leaf, str) and _STARTS_LIKE_SPEC.match(leaf):
        leaf = parse_spec(leaf)
    if isinstance(leaf, Tensor):
        return str(TensorSpec(tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")))
    if isinstance(leaf, TensorSpec):
        return str(leaf)
    is_plain = leaf is None or isinstance(leaf, bool | int | float | complex | str)
    return repr(leaf) if is_plain else type(leaf).__name__


def _find_dtype(name: str | None) -> torch.dtype | None:
    dtype = getattr(torch, name) if name else None
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(
            f"a model cannot be cast to {name}", hint="float32, bfloat16, float16 or float64"
        )
    return dtype


def _refuse_compiled(model: nn.Module) -> None:
    """Raises TraceError if its Python code is not what would run."""
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


def _copy_registered(
    model: nn.Module, copier: TensorCopier, dtype: torch.dtype | None
) -> dict[int, Any]:
    """Fakes of all parameters and buffers, as a memo for ``copy.deepcopy``."""
    memo: dict[int, Any] = {}
    for prefix, module in model.named_modules():
        for value in vars(module).values():
            if isinstance(value, torch.Generator):  # its state must not become a fake
                memo[id(value)] = value.clone_state()
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or id(tensor) in memo:
                continue
            try:
                fake = copy_lazy(tensor, dtype) if is_lazy(tensor) else copier.copy(tensor, dtype)
                attributes = {} if isinstance(tensor, FakeTensor) else vars(tensor)
                vars(fake).update({k: v for k, v in attributes.items() if k not in vars(fake)})
            except TraceError as error:
                cause = f"{_join(prefix, name)!r}: {error.cause}"
                raise TraceError(cause, hint=error.hint) from error
            except Exception as error:
                raise TraceError(
                    f"{_join(prefix, name)!r} has no fake copy: {_summarise(error)}",
                    hint="build the model from strided tensors, plain or of a wrapper subclass",
                ) from error
            memo[id(tensor)] = fake
    return memo


def _replace_registered(model: nn.Module, memo: Mapping[int, Any]) -> None:
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                tensors[name] = None if tensor is None else memo[id(tensor)]


def _belongs_to(model: nn.Module, fake_mode: FakeTensorMode) -> bool:
    tensors = [*model.parameters(), *model.buffers()]
    return bool(tensors) and all(
        isinstance(tensor, FakeTensor) and tensor.fake_mode is fake_mode for tensor in tensors
    )


class _DeepCopyMode(TorchFunctionMode):
    """Makes ``copy.deepcopy`` copy tensors to fakes; for those that no module registered."""

    def __init__(self, copier: TensorCopier) -> None:
        super().__init__()
        self._copier = copier

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self._copier.copy(tensor)
            return memo[id(tensor)]
        if func is torch._C.TensorBase.clone:  # Parameter.__deepcopy__ calls it
            return self._copier.copy(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


def _explain_failed_copy(
    model: nn.Module, copier: TensorCopier, memo: dict[int, Any], error: Exception
) -> TraceError:
    """Names the attribute that cannot be copied, by copying each alone."""
    hint = "pass the class or a factory instead of an instance, e.g. 'module:Model'"
    memo = {**memo, **{id(module): module for module in model.modules()}}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            try:
                with _DeepCopyMode(copier):
                    copy.deepcopy(value, dict(memo))
            except Exception as cause:
                return TraceError(
                    f"the model cannot be copied: attribute {_join(prefix, name)!r} of "
                    f"{type(module).__name__}: {_summarise(cause)}",
                    hint=hint,
                )
    return TraceError(f"the model cannot be copied: {_summarise(error)}", hint=hint)


def _summarise(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
