"""Generation by a language model: a prompt, and tokens one after the other."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from fxmem.analysis import Analysis
from fxmem.errors import FxmemError, TraceError, UsageError
from fxmem.fakes.fake_mode import find_dtype, read_leaf
from fxmem.fakes.values import forget_value
from fxmem.loading.inputs import check_model
from fxmem.loading.target import load_target, prepare_targets
from fxmem.parallelism.process_group import run_outside_modes
from fxmem.scripts.launchers import Launcher
from fxmem.scripts.session import Session
from fxmem.scripts.windows import EnoughSteps, Windows
from fxmem.specs import TensorSpec
from fxmem.training.failures import explain_failure
from fxmem.training.options import Options

_NEW_TOKENS = "max_new_tokens"


def generate(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], new_tokens: int
) -> Any:
    """Generates by the model's own method, or greedily where it has none.

    Raises:
        UsageError: The model does not generate.
    """
    if (method := getattr(model, "generate", None)) is not None:
        parameters = inspect.signature(method).parameters.values()
        has_name = any(each.name == _NEW_TOKENS for each in parameters)
        if has_name or any(each.kind is each.VAR_KEYWORD for each in parameters):
            return method(*args, **kwargs, **{_NEW_TOKENS: new_tokens})
        raise UsageError(
            f"{type(model).__name__}.generate takes no {_NEW_TOKENS}",
            hint="call it in a script, and fxmem run the script",
        )
    tokens, *others = args or (None,)
    for _ in range(new_tokens):
        output = model(tokens, *others, **kwargs)
        logits = next((each for each in tree_leaves(output) if _is_logits(each)), None)
        if tokens is None or logits is None:
            raise UsageError(
                f"{type(model).__name__} has no method generate, and does not return logits",
                hint="its first input are tokens, BATCHxLENGTH:int64; logits are BATCHxLENGTHxN",
            )
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    return tokens


def record_generation(
    model: nn.Module | str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Options,
    new_tokens: int,
) -> Analysis:
    """Records the generation of so many tokens after a prompt.

    Args:
        model: A module, which is left unchanged, or a TARGET.
        args: Positional inputs of ``generate``: tensors, specs or texts.
        kwargs: Keyword inputs.
        options: The target device and what is assumed of it.
        new_tokens: How many tokens are generated.

    Raises:
        UsageError: The model does not generate.
        LoadError: The TARGET cannot be loaded.
        TraceError: The generation cannot be run on fake tensors.
    """
    if new_tokens < 1:
        raise UsageError(f"--new must be 1 or more, got {new_tokens}")
    launcher = Launcher(0, None)
    launcher.script = model if isinstance(model, str) else type(model).__name__
    session = Session(options, Windows(1), launcher, keeps_real=True)
    try:
        with session.watch(), launcher.take_place(), prepare_targets(model):
            with _prepare_model(model, session.fake_mode, options) as prepared:
                given = tree_map(lambda leaf: _make_input(leaf, options), (args, dict(kwargs)))
                under = torch.inference_mode() if options.inference_mode else torch.no_grad()
                with under, _autocast(options), contextlib.suppress(EnoughSteps):
                    generate(prepared, given[0], given[1], new_tokens)
            session.end()
    except FxmemError:
        raise
    except Exception as error:
        raise explain_failure(error, None, options.size_hint is not None) from error
    run = session.describe()
    found = run.generation
    if found is None:
        raise TraceError(f"{launcher.script} did not run while it generated")
    notes = (*found.setup.notes, *run.notes)
    return replace(found, setup=replace(found.setup, notes=notes))


@contextlib.contextmanager
def _prepare_model(
    model: nn.Module | str, fake_mode: FakeTensorMode, options: Options
) -> Iterator[nn.Module]:
    """Moves a model to the device, cast and in ``eval()``."""
    built = model
    if isinstance(built, str):
        with run_outside_modes():
            built = load_target(built, fake_mode)
    check_model(built)
    trained = [module for module in built.modules() if module.training]
    try:
        yield built.eval().to(options.target.name, find_dtype(options.dtype))
    finally:
        for module in trained:
            module.training = True


def _make_input(leaf: Any, options: Options) -> Any:
    """Puts an input on the device; of unknown values where only its spec is given."""
    spec = read_leaf(leaf)
    is_spec = isinstance(spec, TensorSpec)
    if isinstance(spec, TensorSpec):
        leaf = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    if not isinstance(leaf, Tensor):
        return leaf
    cast_to = find_dtype(options.dtype) if leaf.is_floating_point() else None
    placed: Any = leaf.to(options.target.name, cast_to)
    if is_spec:
        forget_value(placed)
    return placed


def _autocast(options: Options) -> contextlib.AbstractContextManager[Any]:
    if options.autocast_to is None:
        return contextlib.nullcontext()
    return torch.autocast(options.target.name, dtype=options.autocast_to)


def _is_logits(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()
