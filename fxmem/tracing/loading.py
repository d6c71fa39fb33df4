"""TARGET text to ``nn.Module``: ``package.module:name``, ``path/to/file.py:name``.

The model is built without memory for its parameters: on fake tensors; where the constructor
looks at values (``torch.linspace(...).tolist()``), for real but with each parameter turned fake
as it is registered; and where it looks at the values of parameters, for real.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fxmem.errors import LoadError
from fxmem.tracing.building import KeepOnCpu, make_parameters_fake, raised_by_fakes
from fxmem.tracing.importing import find_object, find_user_line, import_target
from fxmem.tracing.targets import Target, check_call, parse_target


def load_target(target: str, fake_mode: FakeTensorMode) -> nn.Module:
    """The model that a TARGET names, its parameters without memory where that can be.

    The current folder is importable, as with ``python -m``, and a file's own folder while it
    loads. The random number generators and torch's default dtype are left as they were.

    Args:
        target: ``package.module:name`` or ``path/to/file.py:name``; the name, dotted or not, is
            an ``nn.Module`` class or instance, or a callable that returns one;
            ``'module:factory(depth=50)'`` passes Python literals.
        fake_mode: The mode that the parameters will belong to.

    Returns:
        The module: fake, partly fake, or real; ``make_fake_model`` takes it from there.

    Raises:
        LoadError: The target does not lead to a module; names the user's own line.

    >>> from fxmem.tracing.fakes import make_fake_mode
    >>> load_target("torch.nn:Linear(3, out_features=2)", make_fake_mode()).weight
    Parameter(FakeTensor(..., size=(2, 3), requires_grad=True))
    """
    parsed = parse_target(target)
    with _keep_process_state(), import_target(parsed) as module:
        found = find_object(module, parsed)
        if isinstance(found, nn.Module):
            if parsed.has_call:
                raise LoadError(
                    f"{parsed.text!r}: {parsed.name} is a model already, it takes no arguments",
                    hint=f"write {parsed.without_call!r}",
                )
            return found
        if not callable(found):
            raise LoadError(
                f"{parsed.text!r} is of type {type(found).__name__}, no model",
                hint="name an nn.Module class or instance, or a function that returns one",
            )
        return _build(found, parsed, fake_mode)


def _build(factory: Callable[..., Any], target: Target, fake_mode: FakeTensorMode) -> nn.Module:
    check_call(factory, target)
    errors: list[Exception] = []
    for context in (_build_on_fakes, _build_with_fake_parameters, _build_real):
        # The same error from two ways of building is the user's own: the real way, which
        # allocates everything, would only repeat it.
        if len(errors) == 2 and _are_same(*errors) and not raised_by_fakes(errors[1]):
            break
        try:
            with context(fake_mode):
                model = factory(*target.args, **target.kwargs)
        except Exception as error:
            errors.append(error)
        else:
            return _check_module(model, target)
    raise _explain_failed_build(target, errors[-1]) from errors[-1]


def _explain_failed_build(target: Target, error: Exception) -> LoadError:
    where = find_user_line(error)
    return LoadError(
        f"{target.text!r} raised {type(error).__name__}{': ' if str(error) else ''}{error}"
        f"{f' at {where}' if where else ''}",
        hint="see the whole traceback with --debug",
    )


def _check_module(model: object, target: Target) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, type) and issubclass(model, nn.Module):
        hint = "it returned a class: call it in the function, or name it in the target"
    elif isinstance(model, tuple | list | dict):
        hint = "write a function that returns the model alone"
    else:
        hint = "name an nn.Module class or instance, or a function that returns one"
    returned = "None" if model is None else f"a {type(model).__name__}"
    raise LoadError(f"{target.text!r} returned {returned}, no nn.Module", hint=hint)


def _are_same(first: Exception, second: Exception) -> bool:
    return type(first) is type(second) and str(first) == str(second)


@contextlib.contextmanager
def _build_on_fakes(fake_mode: FakeTensorMode) -> Iterator[None]:
    with fake_mode, KeepOnCpu(), make_parameters_fake(fake_mode, on_registration=False):
        yield


@contextlib.contextmanager
def _build_with_fake_parameters(fake_mode: FakeTensorMode) -> Iterator[None]:
    with KeepOnCpu(), make_parameters_fake(fake_mode, on_registration=True):
        yield


@contextlib.contextmanager
def _build_real(fake_mode: FakeTensorMode) -> Iterator[None]:
    yield


@contextlib.contextmanager
def _keep_process_state() -> Iterator[None]:
    """Puts back what user code may change while it loads and every later result depends on."""
    # Asking for the generators of a GPU that nobody uses yet would start it.
    is_in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if is_in_use else ()
    dtype, python_state = torch.get_default_dtype(), random.getstate()
    grad_enabled = torch.is_grad_enabled()
    numpy_random = sys.modules.get("numpy.random")
    numpy_state = numpy_random.get_state() if numpy_random else None
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_grad_enabled(grad_enabled)
            random.setstate(python_state)
            if numpy_random:
                numpy_random.set_state(numpy_state)
