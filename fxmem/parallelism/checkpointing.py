"""The blocks that a model repeats, and activation checkpoints on them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fxmem.errors import UsageError

CHECKPOINTS = ("none", "ops", "layers:2", "full")
"""Ways to checkpoint, by how much they recompute, the least first."""

_MATMULS = ("aten::mm", "aten::addmm")
_SAVED = (
    *(f"aten::_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::all_to_all_single",
)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Finds the blocks that a model repeats, the outermost ones.

    A model of transformers names the classes of its blocks (``_no_split_modules``); others keep
    blocks of one class in an ``nn.ModuleList`` or ``nn.Sequential``.

    >>> len(find_blocks(nn.ModuleList(nn.Sequential(nn.ReLU()) for _ in range(3))))
    3
    """
    names = getattr(model, "_no_split_modules", None)
    if names:
        return [module for module in model.modules() if type(module).__name__ in names]
    return [*_iterate_blocks(model)]


def _iterate_blocks(module: nn.Module) -> Iterator[nn.Module]:
    children = [*module.children()]
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    kinds = {type(child) for child in children}
    if is_list and len(children) > 1 and len(kinds) == 1 and any(children[0].children()):
        yield from children
        return
    for child in children:
        yield from _iterate_blocks(child)


def checkpoint_blocks(
    model: nn.Module, way: str, blocks: Sequence[nn.Module] | None = None
) -> None:
    """Checkpoints the blocks of a model in place, before or after it is laid out on a mesh.

    The modules keep their names: ``forward`` of each block runs in
    ``torch.utils.checkpoint.checkpoint``, as in ``checkpoint_wrapper``.

    Args:
        model: The model. Where it holds modules of ``checkpoint_wrapper``, it stays as it is.
        way: ``"none"``; ``"ops"`` for all operators but attention and every second matrix product,
            torchtitan's selective checkpointing; ``"layers:N"`` for every Nth block; ``"full"``.
        blocks: The blocks, as found before the model is laid out; None to find them.

    Raises:
        UsageError: There is no such way, or the model repeats no blocks.
    """
    name, _, every = way.partition(":")
    if name not in ("none", "ops", "layers", "full") or (name == "layers") != every.isdecimal():
        raise UsageError(f"unknown checkpointing {way!r}", hint=", ".join(CHECKPOINTS))
    kinds = {type(module).__name__ for module in model.modules()}
    if name == "none" or "CheckpointWrapper" in kinds:
        return
    blocks = find_blocks(model) if blocks is None else blocks
    if not blocks:
        raise UsageError("the model repeats no blocks to checkpoint", hint="checkpoint='none'")
    options: dict[str, Any] = {"context_fn": _keep_products} if name == "ops" else {}
    for block in blocks[:: int(every or 1)]:
        call = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
        block.forward = call


def _keep_products() -> Any:
    """Makes contexts that keep results of attention and of every second matrix product."""
    counts: Counter[bool] = Counter()

    def choose(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = func.name().partition(".")[0]
        counts[context.is_recompute] += name in _MATMULS
        keeps = counts[context.is_recompute] % 2 == 1 if name in _MATMULS else name in _SAVED
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    with torch._C.DisableTorchFunction():
        return create_selective_checkpoint_contexts(choose)  # type: ignore[no-untyped-call]
