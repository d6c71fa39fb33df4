"""Casts of an operator's arguments under CUDA's autocast.

Source: ``aten/src/ATen/autocast_mode.h`` (the policies) and ``autocast_mode.cpp``
(``cached_cast``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from fxmem.kernels.autocast import lists
from fxmem.kernels.cuda.gpu import current_state, is_on_gpu
from fxmem.versions.fallbacks import keeps_casts_in_inference
from fxmem.versions.operators import aten

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]
Cast = Callable[[tuple[Any, ...], dict[str, Any]], CallArguments]

_F = TypeVar("_F", bound=Callable[..., Any])
_KEY = "AutocastCUDA"
_DEVICE = "cuda"


@dataclass(frozen=True, slots=True)
class Policy:
    """Policy by which autocast runs an operator."""

    cast: Cast  # from the operator's arguments to those that it runs with
    operator: OpOverload  # that runs: the operator itself, or its overload that takes a dtype


def is_eligible(value: object) -> bool:
    """``is_eligible``: a floating tensor on the GPU, other than float64."""
    return (
        isinstance(value, Tensor)
        and is_on_gpu(value)
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def cast_cached(dtype: torch.dtype, value: Any) -> Any:
    """``cached_cast``: eligible tensors, also those in a list, in a dtype; all else as it is.

    The cast of a float32 weight to autocast's dtype is kept for its other uses until the
    outermost autocast ends. A weight is a leaf that requires grad and no view.
    """
    if isinstance(value, (list, tuple)):
        return [cast_cached(dtype, entry) for entry in value]
    if not is_eligible(value) or value.dtype == dtype:
        return value
    is_weight = (
        value.dtype == torch.float32
        and value.requires_grad
        and value.is_leaf
        and not value._is_view()
        and torch.is_autocast_cache_enabled()
        and (keeps_casts_in_inference() or not torch.is_inference_mode_enabled())
    )
    if dtype != torch.get_autocast_dtype(_DEVICE) or not is_weight:
        return value.to(dtype)
    casts = current_state().casts
    if value._cdata not in casts:
        # From 2.11 on with gradients, which another use may want.
        with torch.set_grad_enabled(torch.is_grad_enabled() or not keeps_casts_in_inference()):
            reference = torch._C._WeakTensorRef(value)  # type: ignore[attr-defined]
            casts[value._cdata] = (reference, value.to(dtype))
    return casts[value._cdata][1]


def reach_gpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether an argument is on the GPU, so that autocast casts."""
    return any(map(is_on_gpu, _iterate_leaves((args, kwargs))))


@functools.cache
def find_policies() -> dict[OpOverload, Policy]:
    """The policies of all operators that the installed PyTorch's autocast treats."""
    policies = {
        operator: Policy(cast, operator)
        for names, cast in (
            (lists.LOWER_PRECISION, functools.partial(_cast_all, None)),
            (lists.FP32, functools.partial(_cast_all, torch.float32)),
            (lists.FP32_RESULT, _ask_for_fp32),
        )
        for operator in find_operators(names).values()
    }
    for operator in find_operators(lists.PROMOTE).values():
        policies[operator] = Policy(functools.partial(_promote, operator), operator)
    for name, operator in find_operators(lists.FP32_OVERLOAD).items():
        overload = _get_operator(lists.FP32_OVERLOAD[name])
        policies[operator] = Policy(functools.partial(_append_fp32, operator), overload)
    return policies


def follow_autocast(operator: OpOverload) -> Callable[[_F], _F]:
    """Makes a function treat its arguments as autocast treats those of an operator.

    For the replacement of a torch function, which runs before the operator is reached: it gets
    the arguments cast, and runs with autocast off, as what the operator calls does. Autocast must
    cast all tensors of the operator: the function's are found by their type. A function of an
    operator that the installed release's autocast leaves alone stays as it is.
    """
    policy = find_policies().get(operator)

    def decorate(function: _F) -> _F:
        if policy is None:
            return function
        cast = policy.cast

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_autocast_enabled(_DEVICE) or not reach_gpu(args, kwargs):
                return function(*args, **kwargs)
            with exclude_key(torch._C.DispatchKey.AutocastCUDA):
                with torch._C.DisableTorchFunction():
                    args, kwargs = cast(args, kwargs)
                return function(*args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate


def exclude_key(key: torch._C.DispatchKey) -> contextlib.AbstractContextManager[None]:
    """``ExcludeDispatchKeyGuard``."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key))


def find_operators(names: Iterable[str], key: str = _KEY) -> dict[str, OpOverload]:
    """Finds the ATen operators among these for which PyTorch has a kernel under a key."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name: _get_operator(name) for name in names if has_kernel(f"aten::{name}", key)}


def _get_operator(name: str) -> OpOverload:
    base, _, overload = name.partition(".")
    operator: OpOverload = getattr(getattr(aten, base), overload or "default")
    return operator


def _ask_for_fp32(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
    """``fp32_set_opt_dtype``: unless the call names a dtype."""
    named = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
    if named or not is_eligible(args[0]):
        return args, kwargs
    return args, {**kwargs, "dtype": torch.float32}


def _append_fp32(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CallArguments:
    """``fp32_append_dtype``: the overload that takes a dtype has no defaults."""
    given = (*args, *(a.default_value for a in operator._schema.arguments[len(args) :]))
    dtype = torch.float32 if is_eligible(args[0]) else args[0].dtype
    return given, {"dtype": dtype}


def _promote(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
    """``promote_type``: to the widest; neither float64 nor an optional tensor has a say in it."""
    lower = widest = torch.get_autocast_dtype(_DEVICE)
    parameters = zip(operator._schema.arguments, args, strict=False)
    asked = [value for parameter, value in parameters if str(parameter.type) == "Tensor"]
    for tensor in filter(is_eligible, asked):
        if torch.float32 in (widest, tensor.dtype):
            widest = torch.float32
        elif tensor.dtype != lower:
            raise RuntimeError(f"autocast to {lower} cannot promote a tensor of {tensor.dtype}")
    return _cast_all(widest, args, kwargs)


def _cast_all(
    dtype: torch.dtype | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CallArguments:
    """To a dtype, or autocast's; last argument first, as PyTorch's builds for Linux evaluate."""
    dtype = dtype or torch.get_autocast_dtype(_DEVICE)
    named = {name: cast_cached(dtype, kwargs[name]) for name in reversed(kwargs)}
    cast = [cast_cached(dtype, value) for value in reversed(args)]
    return tuple(reversed(cast)), named


def _iterate_leaves(arguments: Any) -> Iterator[Any]:
    for argument in arguments.values() if isinstance(arguments, dict) else arguments:
        if isinstance(argument, (list, tuple, dict)):
            yield from _iterate_leaves(argument)
        else:
            yield argument
