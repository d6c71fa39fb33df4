"""Checkpoints whose parameters get no gradient, though they want one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpointing

from fxmem.patching import patch
from fxmem.source import find_source


@contextlib.contextmanager
def note_dead_checkpoints(notes: MutableMapping[str, None]) -> Iterator[None]:
    """Notes checkpoints with ``use_reentrant=True`` of which no input wants a gradient, within.

    Autograd does not see such a call: ``CheckpointFunction`` in ``torch/utils/checkpoint.py``.
    """

    def note_and_apply(cls: Any, run: Any, preserve_rng_state: bool, *inputs: Any) -> Any:
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        if torch.is_grad_enabled() and not any(x.requires_grad for x in tensors):
            count = sum(parameter.requires_grad for parameter in _list_parameters(run))
            if count:
                source = find_source()
                notes[
                    f"No input of the checkpoint{f' at {source}' if source else ''} wants a"
                    f" gradient: with use_reentrant=True its {count} parameters get none"
                    " (use_reentrant=False)."
                ] = None
        apply: Any = torch.autograd.Function.__dict__["apply"]  # which may be replaced as well
        return apply.__get__(None, cls)(run, preserve_rng_state, *inputs)

    with patch({checkpointing.CheckpointFunction: {"apply": classmethod(note_and_apply)}}):
        yield


def _list_parameters(run: Any) -> list[nn.Parameter]:
    """Lists the parameters of the module that a checkpoint runs; none where that is not known."""
    while isinstance(run, functools.partial):
        run = run.func
    owner = getattr(run, "__self__", run)
    return [*owner.parameters()] if isinstance(owner, nn.Module) else []
