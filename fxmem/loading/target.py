"""TARGET text to ``nn.Module``: ``package.module:name``, ``path/to/file.py:name``.

The model is built without memory for its parameters: on fake tensors; where the constructor
looks at values (``torch.linspace(...).tolist()``), for real but with each parameter turned fake
as it is registered; and where it looks at the values of parameters, for real.
"""

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
from torch.utils import _device
from torch.utils.weak import WeakIdKeyDictionary

from fxmem.errors import LoadError, summarize_error
from fxmem.fakes.fake_mode import TensorCopier
from fxmem.loading.importing import (
    explain_missing_package,
    find_missing_package,
    find_object,
    import_target,
    keep_importable,
)
from fxmem.loading.parsing import Target, check_call, is_target, parse_target
from fxmem.patching import patch
from fxmem.source import find_raising_source
from fxmem.tracing.state import keep_random_states

_FAKE_ERRORS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
_MEANT = "name an nn.Module class or instance, or a function that returns one"


def load_target(target: str, fake_mode: FakeTensorMode | None) -> nn.Module:
    """Builds the model that a TARGET names, its parameters without memory where that can be.

    The current folder is importable, as with ``python -m``, and a file's own folder while it
    loads. The random number generators are left as they were. To be called within
    :func:`prepare_targets`, and :func:`fxmem.fakes.devices.translate_devices` for code that
    names an accelerator.

    Args:
        target: ``package.module:name`` or ``path/to/file.py:name``; the name, dotted or not, is
            an ``nn.Module`` class or instance, or a callable that returns one;
            ``'module:factory(depth=50)'`` passes Python literals.
        fake_mode: The mode that the parameters will belong to; None builds it for real.

    Returns:
        The module: fake, partly fake, or real; ``swap_in_fakes`` takes it from there.

    Raises:
        LoadError: The target does not lead to a module; names the user's own line.

    >>> from fxmem.fakes.fake_mode import make_fake_mode
    >>> load_target("torch.nn:Linear(3, out_features=2)", make_fake_mode()).weight
    Parameter(FakeTensor(..., size=(2, 3), requires_grad=True))
    """
    parsed, grad = parse_target(target), torch.is_grad_enabled()
    with keep_random_states(), torch.set_grad_enabled(grad), keep_importable(parsed):
        found = find_object(import_target(parsed), parsed)
        if isinstance(found, nn.Module):
            if parsed.has_call:
                raise LoadError(
                    f"{parsed.text!r}: {parsed.name} is a model already, it takes no arguments",
                    hint=f"write {parsed.without_call!r}",
                )
            return found
        if not callable(found):
            raise LoadError(
                f"{parsed.text!r} must be a model, got {type(found).__name__}", hint=_MEANT
            )
        return _build(found, parsed, fake_mode)


def load_function(target: str) -> Any:
    """Loads the loss function, or the maker of an optimizer, that a TARGET names.

    A file that the model was loaded from is not imported again.

    Args:
        target: As for a model; with arguments, what the call returns is the function.

    Raises:
        LoadError: The target leads to nothing that can be called.
    """
    parsed, grad = parse_target(target), torch.is_grad_enabled()
    with keep_random_states(), torch.set_grad_enabled(grad), keep_importable(parsed):
        found = find_object(import_target(parsed, again=False), parsed, is_model=False)
        if parsed.has_call and callable(found):
            check_call(found, parsed)
            try:
                found = found(*parsed.args, **parsed.kwargs)
            except (Exception, SystemExit) as error:
                raise _explain_failed_build(parsed, error) from error
    if not callable(found):
        raise LoadError(
            f"{parsed.text!r} must be a function, got {type(found).__name__}",
            hint="name a function of the file or module",
        )
    return found


@contextlib.contextmanager
def prepare_targets(*targets: object) -> Iterator[None]:
    """Lets code that TARGETs name run as in a process of its own, and puts back what it changed.

    It may import from its file's folder when it runs, and its default dtype and device hold.

    Args:
        targets: Texts; anything else is passed over.
    """
    dtype, device = torch.get_default_dtype(), _device.CURRENT_DEVICE
    with contextlib.ExitStack() as stack:
        for target in targets:
            if is_target(target):
                stack.enter_context(keep_importable(parse_target(target)))
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            if device != _device.CURRENT_DEVICE:
                torch.set_default_device(device)


def _build(
    factory: Callable[..., Any], target: Target, fake_mode: FakeTensorMode | None
) -> nn.Module:
    check_call(factory, target)
    ways: list[contextlib.AbstractContextManager[None]] = [contextlib.nullcontext()]
    if fake_mode is not None:
        fake_ways = (make_parameters_fake(fake_mode, on_registration=r) for r in (False, True))
        ways = [*fake_ways, *ways]
    errors: list[Exception] = []
    for context in ways:
        # The same error from two ways of building is the user's own: the real way, which
        # allocates everything, would only repeat it.
        if len({repr(error) for error in errors}) < len(errors) and not raised_by_fakes(errors[1]):
            break
        try:
            with context:
                model = factory(*target.args, **target.kwargs)
        except SystemExit as error:
            raise _explain_failed_build(target, error) from error
        except Exception as error:
            errors.append(error)
            continue
        if isinstance(model, nn.Module):
            return model
        if isinstance(model, list | tuple) and all(isinstance(m, nn.Module) for m in model):
            return nn.ModuleList(model)  # the stages of a pipeline
        returned = "None" if model is None else f"a {type(model).__name__}"
        raise LoadError(f"{target.text!r} returned {returned}, not an nn.Module", hint=_MEANT)
    raise _explain_failed_build(target, errors[-1]) from errors[-1]


def _explain_failed_build(target: Target, error: BaseException) -> LoadError:
    where = find_raising_source(error)
    at = f" at {where}" if where else ""
    if isinstance(error, SystemExit):
        return LoadError(
            f"{target.text!r} calls exit({error.code!r}){at}",
            hint="name a class, or a function that returns the model",
        )
    if name := find_missing_package(error):
        return explain_missing_package(name, str(where or repr(target.text)))
    if "before Module.__init__() call" in str(error):
        hint = "begin its __init__ with super().__init__()"
    elif isinstance(error, OSError):  # a file of weights, or the network
        hint = "memory does not depend on values: build the model without loading weights"
    else:
        hint = "see the whole traceback with --debug"
    return LoadError(f"{target.text!r} raised {summarize_error(error)}{at}", hint=hint)


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
