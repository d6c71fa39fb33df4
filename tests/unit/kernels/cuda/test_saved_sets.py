"""A table of what operators save for backward that CUDA has a function or fake kernel of."""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from cuda_steps import run_step
from saved_sets import ROWS
from saved_sets.row import Row

from fxmem.graph import Category, MemoryGraph
from fxmem.kernels.cuda import CUDA
from fxmem.training import options

REGISTRIES = (CUDA._functions, CUDA._kernels)


@contextmanager
def watch_registries(seen: set[object]) -> Iterator[None]:
    """Notes which entries of the target are used."""

    def noting(key: object, entry: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(entry)
        def run(*args: Any, **kwargs: Any) -> Any:
            seen.add(key)
            return entry(*args, **kwargs)

        return run

    with ExitStack() as stack:
        for registry in REGISTRIES:
            wrapped = {key: noting(key, entry) for key, entry in registry.items()}
            stack.enter_context(mock.patch.dict(registry, wrapped))
        yield


@functools.cache
def take_step(row: Row) -> tuple[MemoryGraph, frozenset[object]]:
    """The step of a row, and the target's entries that it used."""
    seen: set[object] = set()
    with watch_registries(seen), mock.patch.object(options, "describe_gpu", lambda _: row.gpu):
        return run_step(row.run, *row.inputs, mode=row.mode), frozenset(seen)


def describe_saved(graph: MemoryGraph) -> list[tuple[str, int]]:
    """Saved storages as the rows name them, and their bytes."""
    inputs = [s for s in graph.storages if s.category is Category.INPUT]
    found = []
    for storage in graph.storages:
        if not storage.saved_by:
            continue
        if storage.category is Category.INPUT:
            name = f"in{inputs.index(storage)}"
        elif storage.born < 0:
            name = storage.name
        else:
            name = f"{'x'.join(map(str, storage.shape))}:{storage.dtype}"
        found.append((name, storage.nbytes))
    return found


def expect(text: str) -> tuple[str, int | None]:
    """A saved storage of a row, and its bytes; those of inputs and weights are not the point."""
    if not text.startswith((":", *string.digits)):
        return text, None
    shape, _, dtype = text.partition(":")
    dtype = dtype or "float32"
    elements = math.prod(map(int, shape.split("x"))) if shape else 1
    return f"{shape}:{dtype}", elements * getattr(torch, dtype).itemsize


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_what_is_saved(row: Row) -> None:
    found = describe_saved(take_step(row)[0])
    made = [(name, nbytes if ":" in name else None) for name, nbytes in found]
    assert sorted(made, key=str) == sorted(map(expect, row.saved), key=str)


def test_no_name_is_there_twice() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


# Entries that no row uses: without a gradient, below what a row calls, or PyTorch's own code.
_NOT_SAVED = {
    *("TensorBase.quantile", "TensorBase.nanquantile"),
    *("_VariableFunctionsClass.quantile", "_VariableFunctionsClass.nanquantile"),
    *("histc", "_cudnn_rnn_flatten_weight", "addmm.dtype", "baddbmm.dtype"),
    *("_upsample_nearest_exact2d.vec", "upsample_bilinear2d.vec", "upsample_nearest2d.vec"),
    "_embedding_bag_forward_only",
    *("_sample_dirichlet", "_dirichlet_grad", "binomial"),  # the first by torch.distributions
    *("_efficient_attention_forward", "_efficient_attention_backward"),  # xformers saves itself
}


def describe_entry(key: object) -> str:
    """As in the rows above: without the overload where it is the default one."""
    name = key.name() if isinstance(key, torch._ops.OpOverload) else key.__qualname__
    return str(name).removeprefix("aten::")


def test_every_entry_of_the_target_is_in_the_table() -> None:
    used = frozenset().union(*(take_step(row)[1] for row in ROWS))
    known = {describe_entry(key) for registry in REGISTRIES for key in registry}
    left = known - {describe_entry(key) for key in used}
    assert left == _NOT_SAVED, "these need a row in tests/support/saved_sets, or a reason here"
