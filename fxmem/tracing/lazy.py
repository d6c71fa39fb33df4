"""Parameters of lazy modules, whose shape the first forward decides, on fake tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy
from torch.utils._mode_utils import no_dispatch


@dataclass
class _Slot:
    """Where the fake goes, and of which dtype."""

    dtype: torch.dtype
    fake_mode: FakeTensorMode | None = None
    tensors: dict[str, Tensor | None] | None = None
    name: str = ""

    def fill(self, shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
        if self.tensors is None or self.fake_mode is None:
            raise RuntimeError("bind_lazy has not been called on the model")
        with self.fake_mode:
            fake = self.tensors[self.name] = torch.empty(tuple(shape), dtype=dtype or self.dtype)
        return fake


class _LazyFakeParameter(UninitializedParameter):
    """A parameter in whose place a fake is put once its shape is known.

    ``materialize`` of the base changes the tensor in place, and a real one cannot become a fake.
    """

    slot: _Slot

    def materialize(
        self, shape: Sequence[int], device: object = None, dtype: torch.dtype | None = None
    ) -> None:
        fake = self.slot.fill(shape, dtype)
        self.slot.tensors[self.slot.name] = nn.Parameter(  # type: ignore[index]
            fake, self.requires_grad
        )


class _LazyFakeBuffer(UninitializedBuffer):
    """As :class:`_LazyFakeParameter`, for a buffer."""

    slot: _Slot

    def materialize(
        self, shape: Sequence[int], device: object = None, dtype: torch.dtype | None = None
    ) -> None:
        self.slot.fill(shape, dtype)


def copy_lazy(tensor: Any, dtype: torch.dtype | None) -> Tensor:
    """A copy of an uninitialized parameter or buffer that :func:`bind_lazy` makes usable.

    Args:
        tensor: An ``UninitializedParameter`` or ``UninitializedBuffer``.
        dtype: What it is cast to if it is a floating one.
    """
    own = tensor.dtype
    dtype = dtype if dtype and own.is_floating_point else own
    kind: Any = (
        _LazyFakeParameter if isinstance(tensor, UninitializedParameter) else _LazyFakeBuffer
    )
    with no_dispatch():
        lazy = kind(tensor.requires_grad, device="cpu", dtype=dtype)
    lazy.slot = _Slot(dtype)
    return lazy  # type: ignore[no-any-return]


def bind_lazy(model: nn.Module, fake_mode: FakeTensorMode) -> None:
    """Tells each lazy copy in the model where it lies, so that a fake can take its place."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if isinstance(tensor, _LazyFakeParameter | _LazyFakeBuffer):
                    tensor.slot = _Slot(tensor.slot.dtype, fake_mode, tensors, name)  # type: ignore[arg-type]


def settle_lazy(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], fake_mode: FakeTensorMode
) -> None:
    """Runs a model that has lazy parameters once, so that they get their shapes.

    An optimizer made before would hold what they were instead of what they became. A model
    without lazy parameters is not run.
    """
    if any(is_lazy(tensor) for tensor in [*model.parameters(), *model.buffers()]):
        with fake_mode, torch.no_grad():
            model(*args, **kwargs)
