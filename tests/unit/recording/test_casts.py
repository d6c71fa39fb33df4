"""Casts that autocast keeps, and until when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from running import Runs
from torch import Tensor, nn
from torch.nn import functional as F

import fxmem
from fxmem.graph import Phase

Run = Callable[[Any, Tensor], Tensor]


def build(run: Run) -> nn.Module:
    frozen = nn.Linear(4, 6, bias=False).requires_grad_(False)
    return Runs(run, layer=nn.Linear(4, 5, bias=False), frozen=frozen)


class CastByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
        return x.bfloat16() @ weight.to(torch.bfloat16).t()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return None, None


def list_kept(run: Run, **options: Any) -> list[tuple[int, ...]]:
    graph = fxmem.analyze(build(run), ("3x4",), **options).graph
    kept = [storage for storage in graph.storages if storage.cast_until is not None]
    stop = next((o.index for o in graph.operations if o.phase is Phase.BACKWARD), None)
    last = (len(graph.operations) if stop is None else stop) - 1
    assert all(storage.cast_until == last for storage in kept)
    return [storage.shape for storage in kept]


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_weight_s_cast_is_kept_to_the_end(device: str, mode: str) -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        return model.layer(x) + model.layer(x * 2)

    options = {"device": device, "mode": mode, "loss": lambda output: output.float().sum()}
    assert list_kept(run, autocast="bf16", **options) == [(5, 4)]
    assert list_kept(run, **options) == []


def run_without_cache(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return model.layer(x)


@pytest.mark.parametrize(
    "run",
    [
        lambda m, x: m.frozen(x) + m.layer.weight.sum(),
        lambda m, x: x.bfloat16() @ m.layer.weight.bfloat16().t(),
        lambda m, x: F.linear(x, m.layer.weight * 2),
        lambda m, x: CastByHand.apply(x, m.layer.weight),
        run_without_cache,
    ],
    ids=["frozen", "by hand", "computed", "by hand in a function", "without a cache"],
)
def test_other_casts_are_not(run: Run) -> None:
    assert list_kept(run, device="cpu", autocast="bf16") == []


def test_the_end_is_that_of_the_model_s_own_autocast() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = model.layer(x).float()
        return x.exp().sin()

    graph = fxmem.analyze(build(run), ("3x4",), device="cpu").graph
    (cast,) = [storage for storage in graph.storages if storage.cast_until is not None]
    assert cast.cast_until is not None
    assert graph.operations[cast.cast_until + 1].name == "aten.exp.default"


def test_casts_are_freed_in_one_order_run_by_run() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    graph = fxmem.analyze(model, ("3x4",), autocast="bf16", mode="infer", device="cpu").graph
    kept = [storage for storage in graph.storages if storage.cast_until is not None]
    ranks = [storage.death_rank for storage in kept]
    assert len(kept) == 16 and ranks == sorted(ranks)
