"""Building a model without memory for its parameters."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from fxmem.fakes.fake_mode import TensorCopier
from fxmem.patching import patch

_FAKE_ERRORS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


def raised_by_fakes(error: Exception) -> bool:
    """Returns whether an error may come of fake tensors alone."""
    return isinstance(error, _FAKE_ERRORS) or "fake" in str(error).lower()


def silence_fake_kernels() -> contextlib.AbstractContextManager[None]:
    """Keeps PyTorch from logging, with a traceback, what a fake kernel raises as well."""
    return patch({logging.getLogger("torch._subclasses.fake_tensor"): {"disabled": True}})


@contextlib.contextmanager
def make_parameters_fake(fake_mode: FakeTensorMode, *, on_registration: bool) -> Iterator[None]:
    """Lets modules be built on fake parameters; without ``on_registration``, under the mode.

    Modules convert as in :func:`replace_converted`. ``trunc_normal_`` draws again until no value
    is outside its bounds, and a fake has no values.

    Args:
        fake_mode: The mode that the fakes belong to.
        on_registration: Turn each real parameter fake as a module registers it.
    """
    handle = None
    if on_registration:
        handle = register_module_parameter_registration_hook(_Registration(fake_mode))  # type: ignore[arg-type]
    truncate = nn.init._no_grad_trunc_normal_

    def truncate_real(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else truncate(tensor, *args, **kwargs)

    try:
        with (
            contextlib.nullcontext() if on_registration else fake_mode,
            patch({nn.init: {"_no_grad_trunc_normal_": truncate_real}}),
            replace_converted(),
            warnings.catch_warnings(),
        ):
            # Copies of parameters ask where they lie: layers of nn.TransformerEncoder are copied.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    finally:
        if handle:
            handle.remove()


def replace_converted() -> contextlib.AbstractContextManager[None]:
    """Makes ``nn.Module.to`` and its like replace a fake parameter by the converted one.

    They swap the two (``Module._apply``), which torch refuses where something holds a weak
    reference to one, as the mode of the fakes does.
    """
    return patch({nn.Module: {"_apply": _make_apply(nn.Module._apply)}})


class _Registration:
    """The hook that turns a real parameter fake; one that two modules share stays one."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self._fake_mode = fake_mode
        self._fakes: MutableMapping[Any, Tensor] = WeakIdKeyDictionary()

    def __call__(self, module: nn.Module, name: str, parameter: Any) -> Tensor | None:
        if parameter is None or isinstance(parameter, FakeTensor) or is_lazy(parameter):
            return None
        if parameter not in self._fakes:
            # A copier each: once the real one is freed, another may have its address.
            self._fakes[parameter] = TensorCopier(self._fake_mode).copy(parameter)
        return self._fakes[parameter]


def _make_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    converted: dict[int, tuple[Any, Any]] = {}  # old and new; both alive, so that ids are unique
    depth = 0  # one call for a model goes down to all its modules

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        nonlocal depth
        parameters: dict[str, Any] = module._parameters
        fakes = {name: p for name, p in parameters.items() if isinstance(p, FakeTensor)}
        parameters.update(dict.fromkeys(fakes))
        depth += 1
        try:
            original(module, fn, recurse)
        finally:
            parameters.update(fakes)
            depth -= 1
        for name, parameter in fakes.items():
            if id(parameter) not in converted:
                with torch.no_grad():
                    result = fn(parameter)
                if result is not parameter:
                    result = nn.Parameter(result, parameter.requires_grad)
                converted[id(parameter)] = parameter, result
            parameters[name] = converted[id(parameter)][1]
        if not depth:
            converted.clear()
        return module

    return apply
