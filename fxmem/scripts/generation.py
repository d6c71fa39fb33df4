"""Generation by a language model: a prompt, and tokens one after the other."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fxmem.analysis import Analysis
from fxmem.errors import FxmemError, TraceError, UsageError
from fxmem.fakes.swapping import swap_in_fakes
from fxmem.fakes.values import is_whole
from fxmem.loading.inputs import check_model
from fxmem.loading.target import load_target
from fxmem.parallelism.process_group import make_mesh
from fxmem.parallelism.wrapping import copy_model, parallelize_model
from fxmem.patching import patch
from fxmem.scripts.launchers import Launcher
from fxmem.scripts.session import Session
from fxmem.scripts.windows import EnoughSteps, Windows
from fxmem.tracing.compiled import patch_when_imported
from fxmem.training.failures import explain_failure
from fxmem.training.options import Options, load_choice

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
    if not args and not kwargs:
        raise UsageError("no prompt is given", hint="--prompt 2048, or --input 16x2048:int64")
    launcher = Launcher(0, None)
    launcher.script = model if isinstance(model, str) else type(model).__name__
    session = Session(options, Windows(1), launcher)
    built = load_target(model, session.fake_mode) if isinstance(model, str) else model
    check_model(built)
    fakes = swap_in_fakes(built, session.fake_mode, args, kwargs, dtype=options.dtype, train=False)
    try:
        with fakes as (*given, _), session.watch(), launcher.take_place():
            device = options.target.name
            given, named = tree_map_only(Tensor, lambda tensor: tensor.to(device), given)
            if _takes_mask(built, given, named):
                named["attention_mask"] = torch.ones_like(given[0])  # no prompt is padded
            placed = _place(built, options)
            under = torch.inference_mode() if options.inference_mode else torch.no_grad()
            with under, _autocast(options), contextlib.suppress(EnoughSteps):
                generate(placed, given, named, new_tokens)
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


def _place(model: nn.Module, options: Options) -> nn.Module:
    """Moves a model to the device; or a copy, which is laid out on the mesh of the options."""
    layout, device = options.layout, options.target.name
    if layout is None:
        return model.to(device)
    mesh = make_mesh(layout, device)
    copied = copy_model(model).to(device)
    return parallelize_model(copied, load_choice(layout.parallelize), mesh, layout.knobs)


def _takes_mask(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a model would look for padding among the tokens of prompts."""
    parameters = inspect.signature(model.forward).parameters
    is_given = "attention_mask" in kwargs or len(args) != 1 or not is_whole(args[0])
    return not is_given and "attention_mask" in parameters and hasattr(model, "generation_config")


def _autocast(options: Options) -> contextlib.AbstractContextManager[Any]:
    if options.autocast_to is None:
        return contextlib.nullcontext()
    return torch.autocast(options.target.name, dtype=options.autocast_to)


def _is_logits(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()


def limit_generation(new_tokens: int | None) -> contextlib.AbstractContextManager[None]:
    """Ends texts after so many new tokens, within; None for where the script ends them.

    Without values no text ends before its limit; a real one seldom comes so far.

    Raises:
        UsageError: The number is below 1.
    """
    if new_tokens is None:
        return contextlib.nullcontext()
    if new_tokens < 1:
        raise UsageError(f"--new must be 1 or more, got {new_tokens}")
    make = functools.partial(_replace_generate, new_tokens)
    return patch_when_imported("transformers.generation.utils", make)


def _replace_generate(
    new_tokens: int, module: ModuleType
) -> contextlib.AbstractContextManager[None]:
    mixin: Any = vars(module)["GenerationMixin"]
    run: Any = mixin.generate

    @functools.wraps(run)
    def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
        config = config or getattr(model, "generation_config", None)
        limits = (new_tokens, kwargs.get(_NEW_TOKENS), getattr(config, _NEW_TOKENS, None))
        kwargs[_NEW_TOKENS] = min(limit for limit in limits if limit is not None)
        kwargs.pop("max_length", None)
        return run(model, *args, **kwargs)

    return patch({mixin: {"generate": generate}})
