"""Benchmark cases, and helpers that turn their specifications into tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn

SEED = 20240

_library: torch.library.Library | None = None


@dataclass(frozen=True)
class Spec:
    """One input tensor: standard normal if floating, else uniform in `[0, high)`."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    high: int = 2
    requires_grad: bool = False

    def tensor(self, generator: torch.Generator) -> torch.Tensor:
        """Makes the tensor; the same generator state gives the same values."""
        if self.dtype.is_floating_point:
            value = torch.randn(self.shape, generator=generator).to(self.dtype)
        else:
            value = torch.randint(0, self.high, self.shape, generator=generator).to(self.dtype)
        return value.requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class Case:
    """A model and the inputs of its step; nothing is built until asked for.

    Attributes:
        name: Of the case.
        build: Makes the model.
        args: Positional inputs.
        kwargs: Keyword inputs.
        autocast: What the equivalence suite autocasts forward and loss to; None for nothing.
    """

    name: str
    build: Callable[[], nn.Module]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    autocast: torch.dtype | None = None

    def model(self) -> nn.Module:
        """Builds the model with a fixed seed."""
        torch.manual_seed(SEED)
        return self.build()

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Makes the inputs: specs become tensors, everything else passes through."""
        generator = torch.Generator().manual_seed(SEED)

        def make(value: Any) -> Any:
            if isinstance(value, Spec):
                return value.tensor(generator)
            if isinstance(value, list):
                return [make(item) for item in value]
            if isinstance(value, dict):
                return {key: make(item) for key, item in value.items()}
            return value

        return tuple(map(make, self.args)), {k: make(v) for k, v in self.kwargs.items()}


@dataclass(frozen=True)
class Boxes(Spec):
    """Boxes as detection models take them: corners, in pixels, of positive width and height."""

    def tensor(self, generator: torch.Generator) -> torch.Tensor:
        """Makes the tensor; the same generator state gives the same values."""
        corner = torch.rand((self.shape[0], 2), generator=generator) * 100
        return torch.cat([corner, corner + 60], dim=1)


def image(*shape: int, requires_grad: bool = False) -> Spec:
    """Specifies a float32 image batch (or video, or feature) of `shape`."""
    return Spec(shape, requires_grad=requires_grad)


def ids(*shape: int, high: int = 100) -> Spec:
    """Specifies int64 token ids or class labels below `high`."""
    return Spec(shape, torch.int64, high)


def import_torchvision() -> ModuleType:
    """Imports torchvision, defining the operators that its compiled half would register.

    There is no wheel of torchvision's compiled half for the CPU builds of torch, and importing
    the Python half registers fake kernels for operators that then do not exist. The models
    themselves need none of them.
    """
    global _library  # a Library undefines its operators when it is collected
    if "torchvision" not in sys.modules and torch.version.cuda is None:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _library = library
    import torchvision

    return torchvision


def vision(name: str, **kwargs: Any) -> Callable[[], nn.Module]:
    """Returns a builder of the torchvision model `name` with random weights."""

    def build() -> nn.Module:
        models = import_torchvision().models
        return models.get_model(name, weights=None, **kwargs)

    return build


def timm_model(name: str, **kwargs: Any) -> Callable[[], nn.Module]:
    """Returns a builder of the timm model `name` with random weights."""

    def build() -> nn.Module:
        import_torchvision()  # timm imports torchvision, and would without the operators fail
        import timm

        return timm.create_model(name, pretrained=False, **kwargs)

    return build


def hugging_face(model: str, config: str, **kwargs: Any) -> Callable[[], nn.Module]:
    """Returns a builder of the transformers class `model` from the config class `config`."""

    def build() -> nn.Module:
        import_torchvision()
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**kwargs))

    return build
