"""Modules that a script moves to the GPU, where their parameters become fake in place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedTensorMixin, is_lazy  # type: ignore[attr-defined]
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from fxmem.fakes.fake_mode import make_fake_subclass, view_as_fake_subclass
from fxmem.fakes.reach import list_slots
from fxmem.kernels.registry import Backend


class Moves:
    """Replaces what moves modules.

    Args:
        target: The device whose kernels run.
        run_move: Runs the function that moves a module, which it is given too.
        keeps_real: Whether the real tensors come back in the end, and so keep their memory.
    """

    def __init__(
        self,
        target: Backend,
        run_move: Callable[[nn.Module, Callable[[], Any]], Any],
        *,
        keeps_real: bool,
    ) -> None:
        self._target = target
        self._run_move = run_move
        self._keeps_real = keeps_real
        # By what a program may let go of: then there is nothing to give back.
        self._swapped: MutableMapping[Any, Tensor] = WeakTensorKeyDictionary()
        self._buffers: MutableMapping[Any, dict[str, Any]] = WeakIdKeyDictionary(ref_type=ref)
        self._gradients: MutableMapping[Any, Tensor | None] = WeakTensorKeyDictionary()
        self._empty: MutableMapping[Any, Tensor] = WeakTensorKeyDictionary()

    def list_replacements(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        """Lists owners, names, and functions that make a replacement of the function there."""
        return [
            (nn.Module, "_apply", self._move_module),
            (UninitializedTensorMixin, "materialize", self._materialize),
            (torch.utils, "swap_tensors", lambda swap: self._swap),
            (Tensor, "_make_subclass", _make_subclass_of_fakes),
            (Tensor, "as_subclass", _make_subclass_on_fakes),
            (FakeTensor, "__new__", _make_by_class),
        ]

    def restore(self) -> None:
        """Gives modules back the tensors that they had before."""
        for one, other in self._swapped.items():
            _swap_tensors(one, other)
        for module, buffers in self._buffers.items():
            module._buffers.update(buffers)
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        self._swapped.clear()
        self._buffers.clear()
        self._gradients.clear()

    def _move_module(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        def _apply(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self._keeps_real:
                # Fakes are not: one that is kept would stay alive to the recording.
                real = {n: each for n, each in module._buffers.items() if not _is_fake(each)}
                self._buffers.setdefault(module, real)
                for each in module._parameters.values():
                    if each is not None and not _is_fake(each):
                        self._gradients.setdefault(each, each.grad)
            with self._leave_out_lazy(module, *args):
                result = self._run_move(module, lambda: apply(module, *args, **kwargs))
            is_moved = any(isinstance(each, FakeTensor) for each in module._parameters.values())
            for kind, move in self._target.movers.items():
                if isinstance(module, kind) and is_moved:
                    move(module)
            return result

        return _apply

    @contextlib.contextmanager
    def _leave_out_lazy(self, module: nn.Module, move: Any, *_: Any) -> Iterator[None]:
        """Leaves out parameters and buffers of no size yet; notes where they will be made."""
        kinds: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        lazy = [{name: each for name, each in kind.items() if is_lazy(each)} for kind in kinds]
        for kind, left_out in zip(kinds, lazy, strict=True):
            for name, each in left_out.items():
                made = self._empty.get(each)
                self._empty[each] = move(torch.empty(0, dtype=each.dtype) if made is None else made)
                kind[name] = None
        try:
            yield
        finally:
            for kind, left_out in zip(kinds, lazy, strict=True):
                kind.update(left_out)

    def _materialize(self, materialize: Callable[..., Any]) -> Callable[..., Any]:
        def make(lazy: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
            empty = self._empty.get(lazy, lazy)
            data = torch.empty(shape, device=device or empty.device, dtype=dtype or empty.dtype)
            if not _is_fake(data):
                materialize(lazy, shape, device, dtype)
                return
            is_parameter = issubclass(lazy.cls_to_become, nn.Parameter)
            swap: Any = torch.utils.swap_tensors
            swap(lazy, nn.Parameter(data, lazy.requires_grad) if is_parameter else data)

        return make

    def _swap(self, one: Tensor, other: Tensor) -> None:
        if self._keeps_real and not _is_fake(one):
            self._swapped[one] = other
        _swap_tensors(one, other)


def _is_fake(tensor: Tensor | None) -> bool:
    return isinstance(tensor, FakeTensor)


def _make_subclass_of_fakes(make_subclass: Callable[..., Any]) -> Any:
    def make(kind: type[Tensor], data: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, FakeTensor):
            return make_fake_subclass(kind, data, *args)
        return make_subclass(kind, data, *args, **kwargs)

    return staticmethod(make)


def _make_subclass_on_fakes(as_subclass: Callable[..., Any]) -> Any:
    def make(data: Tensor, kind: type[Tensor]) -> Any:
        return view_as_fake_subclass(kind, data) if _is_fake(data) else as_subclass(data, kind)

    return make


def _make_by_class(make: Callable[..., Any]) -> Any:
    """Makes a tensor where ``type(tensor)`` is called with another, and a parameter likewise.

    ``init_on_device`` of accelerate (``big_modeling.py``) and of transformers 4 hands over what
    the parameter's dict holds.
    """

    def make_alike(kind: type[Tensor], *args: Any, **kwargs: Any) -> Any:
        if not (args and isinstance(args[0], Tensor)):
            return make(kind, *args, **kwargs)
        if "requires_grad" in kwargs:
            return nn.Parameter(args[0], bool(kwargs["requires_grad"]))
        data = args[0].detach()
        return view_as_fake_subclass(kind, data) if _is_fake(data) else data

    return make_alike


def _swap_tensors(one: Any, other: Any) -> None:
    """Swaps what two tensor objects are; ``torch.utils.swap_tensors`` without its checks.

    It refuses tensors with weak references, and the mode of the fakes has some to each.
    """
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    kind: Any = type(one)
    for name in list_slots(kind):  # a DTensor's local tensor and placements
        mine, its = getattr(one, name), getattr(other, name)
        setattr(one, name, its)
        setattr(other, name, mine)
    torch._C._swap_tensor_impl(one, other)
