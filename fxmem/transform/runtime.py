"""What the code of a planned model calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint


def checkpoint(
    segment: Callable[..., Any],
    *inputs: Any,
    random: bool = False,
    norms: Sequence[nn.Module] = (),
) -> Any:
    """Runs a segment without saving what its backward needs, which computes it again.

    Args:
        segment: The code of the segment.
        inputs: What it takes; held until its backward is over.
        random: Whether it draws random numbers, which must come out the same again.
        norms: Its batch normalisations, whose statistics the second run must not update.

    Returns:
        What the segment returns.
    """
    if not torch.is_grad_enabled():
        return segment(*inputs)
    return torch_checkpoint(
        segment,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=random,
        context_fn=lambda: (contextlib.nullcontext(), _spare_statistics(norms)),
    )


@contextlib.contextmanager
def _spare_statistics(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Lets batch normalisations update copies of their running statistics."""
    originals = [module._buffers.copy() for module in norms]
    try:
        for module, buffers in zip(norms, originals, strict=True):
            for name, buffer in buffers.items():
                module._buffers[name] = None if buffer is None else buffer.clone()
        yield
    finally:
        for module, buffers in zip(norms, originals, strict=True):
            module._buffers.update(buffers)
