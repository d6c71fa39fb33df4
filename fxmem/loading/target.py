"""TARGET text to ``nn.Module``: ``package.module:name``, ``path/to/file.py:name``.

The model is built without memory for its parameters: on fake tensors; where the constructor
looks at values (``torch.linspace(...).tolist()``), for real but with each parameter turned fake
as it is registered; and where it looks at the values of parameters, for real.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _device

from fxmem.errors import LoadError, summarize_error
from fxmem.loading.building import make_parameters_fake, raised_by_fakes
from fxmem.loading.importing import (
    explain_missing_package,
    find_missing_package,
    find_object,
    import_target,
    keep_importable,
)
from fxmem.loading.parsing import Target, check_call, is_target, parse_target
from fxmem.source import find_raising_source
from fxmem.tracing.state import keep_random_states

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
