"""Lengths of texts that transformers generates in a script."""

from __future__ import annotations

import contextlib
import functools
from types import ModuleType
from typing import Any

from fxmem.errors import UsageError
from fxmem.patching import patch
from fxmem.tracing.compiled import patch_when_imported

_LIMIT = "max_new_tokens"


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
        limits = (new_tokens, kwargs.get(_LIMIT), getattr(config, _LIMIT, None))
        kwargs[_LIMIT] = min(limit for limit in limits if limit is not None)
        kwargs.pop("max_length", None)
        return run(model, *args, **kwargs)

    return patch({mixin: {"generate": generate}})
