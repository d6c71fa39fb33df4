"""A model copied to fake tensors with all that its code reaches: hooks, closures, optimizers."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from fxmem.errors import TraceError, summarize_error
from fxmem.tracing.deepcopy import Memo, copy_through_functions, find_class_state, undo_failed
from fxmem.tracing.hooks import carry_over
from fxmem.tracing.lazy import copy_lazy
from fxmem.tracing.reach import iterate_reached
from fxmem.tracing.tensor_copier import TensorCopier
from fxmem.tracing.views import take_again

_Named = list[tuple[str, Tensor]]
_NODES = "_fxmem_nodes"  # on a copied model: what nothing else keeps


def copy_model(
    model: nn.Module, fake_mode: FakeTensorMode, dtype: torch.dtype | None, memo: Memo
) -> nn.Module:
    """A copy on fake CPU tensors; see :func:`fxmem.tracing.fakes.make_fake_model`.

    Args:
        model: Its tensors real, meta or fake, on any device.
        fake_mode: The mode that the fakes belong to.
        dtype: What floating parameters and buffers are cast to.
        memo: Gets the copy of each object that the model reaches.

    Raises:
        TraceError: The model cannot be copied.
    """
    copier = TensorCopier(fake_mode)
    registered = {id(tensor): name for name, tensor in _list_registered(model)}
    tensors: _Named = []
    for tensor in sorted(_list_tensors(model), key=_find_order):
        name = registered.get(id(tensor))
        if id(tensor) in memo:  # the gradient of a registered one, cast as that is
            continue
        if name is not None:
            _copy_registered(name, tensor, copier, dtype, memo)
        else:
            # What fails here fails again where it is copied, and is told by its attribute.
            with contextlib.suppress(Exception):
                memo[id(tensor)] = _copy_tensor(tensor, copier, None, memo)
        if id(tensor) in memo:
            tensors.append((name or f"a tensor of {type(model).__name__}", tensor))
    memo |= find_class_state(model)
    with copy_through_functions(model.modules()), _DeepCopyMode(copier):
        try:
            with undo_failed(memo):
                fake = copy.deepcopy(model, memo)
        except Exception as error:
            if not _belongs_to(model, fake_mode):
                raise _explain_failed_copy(model, memo, error) from error
            fake = model
            _replace_registered(fake, memo)
        kept = _carry_over(tensors, memo)
    if kept:
        vars(fake)[_NODES] = kept
    return fake


def copy_objects(
    values: Sequence[object], copied: Iterable[tuple[Tensor, Tensor]], copier: TensorCopier
) -> list[Any]:
    """Copies of objects that come with the inputs, such as caches, and hooks on the inputs.

    An object that cannot be copied stays itself.

    Args:
        values: The objects.
        copied: Each input tensor with its copy.
        copier: What made the copies.
    """
    pairs = [*copied]
    memo: Memo = {id(tensor): fake for tensor, fake in pairs}
    with copy_through_functions(), _DeepCopyMode(copier):
        _carry_over([("an input", tensor) for tensor, _ in pairs], memo)
        return [_copy_object(value, memo) for value in values]


def copy_reader(function: Callable[..., Any], memo: Memo) -> Callable[..., Any]:
    """A copy of a function that reads copied tensors or modules where it read the originals.

    Tensors that were not copied stay themselves. A function that reaches none of the originals,
    or cannot be copied, stays itself.

    Args:
        function: A loss, for instance, that compares an output with the model's own input.
        memo: The copies, by the ids of their originals.
    """
    reached = [*iterate_reached(function)]
    if not any(id(value) in memo for value in reached):
        return function
    kept: Memo = {id(value): value for value in reached if isinstance(value, Tensor)}
    with copy_through_functions():
        copied: Callable[..., Any] = _copy_object(function, kept | memo)
    return copied


def _copy_object(value: object, memo: Memo) -> Any:
    try:
        with undo_failed(memo):
            return copy.deepcopy(value, memo)
    except Exception:
        return value


def _list_registered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, each once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield _join(prefix, name), tensor


def _copy_registered(
    name: str, tensor: Tensor, copier: TensorCopier, dtype: torch.dtype | None, memo: Memo
) -> None:
    """Puts the fake of a parameter or buffer, and of its gradient, into the memo."""
    try:
        if is_lazy(tensor):
            memo[id(tensor)] = copy_lazy(tensor, dtype)
            return
        memo[id(tensor)] = _copy_tensor(tensor, copier, dtype, memo)
        if tensor.is_leaf and tensor.grad is not None:
            memo[id(tensor.grad)] = copier.copy(tensor.grad, dtype)
    except TraceError as error:
        raise TraceError(f"{name!r}: {error.cause}", hint=error.hint) from error
    except Exception as error:
        raise TraceError(
            f"{name!r} has no fake copy: {summarize_error(error)}",
            hint="build the model from strided tensors, plain or of a wrapper subclass",
        ) from error


def _copy_tensor(
    tensor: Tensor, copier: TensorCopier, dtype: torch.dtype | None, memo: Memo
) -> Tensor:
    """A fake; of a view through which gradients reach a parameter, the same view of its fake."""
    if not tensor.is_leaf:
        with torch.enable_grad():
            view = take_again(tensor, memo)
        if view is not None:
            return view
    return copier.copy(tensor, dtype)


def _list_tensors(model: nn.Module) -> Iterator[Tensor]:
    """All tensors that the model reaches, the registered ones first."""
    seen: set[int] = set()
    registered = (tensor for _, tensor in _list_registered(model))
    reached = (tensor for tensor in iterate_reached(model) if isinstance(tensor, Tensor))
    for tensor in itertools.chain(registered, reached):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def _find_order(tensor: Tensor) -> int:
    """Leaves first; then in the order in which backward, which goes by it, finds them."""
    node = None if tensor.is_leaf else tensor.grad_fn
    return -1 if node is None else int(node._sequence_nr())


def _carry_over(tensors: _Named, memo: Memo) -> list[Any]:
    kept: list[Any] = []
    for name, tensor in tensors:
        try:
            kept += [] if is_lazy(tensor) else carry_over(tensor, memo[id(tensor)], name, memo)
        except Exception as error:
            raise TraceError(
                f"what is set on {name!r} cannot be copied: {summarize_error(error)}",
                hint="take the attribute off the tensor",
            ) from error
    return kept


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


def _explain_failed_copy(model: nn.Module, memo: Memo, error: Exception) -> TraceError:
    """Names the attribute that cannot be copied, by copying each alone."""
    hint = "pass the class or a factory instead of an instance, e.g. 'module:Model'"
    memo = {**memo, **{id(module): module for module in model.modules()}}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            try:
                copy.deepcopy(value, dict(memo))
            except Exception as cause:
                return TraceError(
                    f"the model cannot be copied: attribute {_join(prefix, name)!r} of "
                    f"{type(module).__name__}: {summarize_error(cause)}",
                    hint=hint,
                )
    return TraceError(f"the model cannot be copied: {summarize_error(error)}", hint=hint)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
