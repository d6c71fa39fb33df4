"""Checkpoints on repeated blocks, and the policies of fully_shard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fxmem
from fxmem.errors import UsageError
from fxmem.parallelism.checkpointing import CHECKPOINTS, checkpoint_blocks
from fxmem.parallelism.wrapping import shard_blocks

WIDTH = 32


class Block(nn.Sequential):
    def __init__(self) -> None:
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]
        super().__init__(*(each for layer in layers for each in (layer, nn.Tanh())))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


def analyze(way: str = "none", **policies: Any) -> fxmem.Analysis:
    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        checkpoint_blocks(model, way)
        return shard_blocks(model, mesh, **policies)

    fixed: dict[str, Any] = {"mesh": {"dp": 8}, "loss": "mse", "optimizer": "adam"}
    return fxmem.analyze(make_model(), f"1024x{WIDTH}", parallelize=parallelize, **fixed)


def list_recomputed(analysis: fxmem.Analysis) -> Iterator[str]:
    for operation in analysis.graph.operations:
        if operation.recomputed and operation.flops:
            yield operation.name


@pytest.mark.parametrize(("way", "products"), [*zip(CHECKPOINTS, [0, 8, 8, 16], strict=True)])
def test_recomputed_products(way: str, products: int) -> None:
    # The last product of a block is followed by an activation, so that early stopping needs all.
    assert len([*list_recomputed(analyze(way))]) == products


@pytest.mark.parametrize("way", CHECKPOINTS)
def test_gradients_are_the_same(way: str) -> None:
    found = []
    for each in ("none", way):
        model = make_model()
        checkpoint_blocks(model, each)
        model(torch.ones(2, WIDTH)).sum().backward()
        found.append([(name, p.grad) for name, p in model.named_parameters()])
    for (name, expected), (other, actual) in zip(*found, strict=True):
        assert name == other
        assert torch.equal(expected, actual)


def test_checkpoints_of_tensor_parallel_blocks() -> None:
    def parallelize(model: Any, mesh: Any) -> None:
        for block in model.children():
            parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        checkpoint_blocks(model, "full")

    fixed: dict[str, Any] = {"mesh": {"tp": 2}, "loss": "mse"}
    analysis = fxmem.analyze(make_model(), f"1024x{WIDTH}", parallelize=parallelize, **fixed)
    assert len([*list_recomputed(analysis)]) == 16


def test_checkpoints_of_the_user_stay() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(*map(checkpoint_wrapper, make_model()))
    checkpoint_blocks(model, "full")
    assert not any("forward" in vars(module) for module in model.modules())


def test_refusals() -> None:
    with pytest.raises(UsageError, match=r"unknown checkpointing 'layers'"):
        checkpoint_blocks(make_model(), "layers")
    with pytest.raises(UsageError, match="repeats no blocks to checkpoint"):
        checkpoint_blocks(nn.Linear(1, 1), "full")


def test_policies_of_fully_shard() -> None:
    plain, kept, half, on_host = (
        analyze(),
        analyze(reshards=False),
        analyze(param_dtype=torch.bfloat16),
        analyze(offloads=True),
    )
    names = [operation.name for operation in plain.graph.operations]
    gathers = names.count("c10d._allgather_base_.default")
    assert gathers > [o.name for o in kept.graph.operations].count("c10d._allgather_base_.default")
    assert half.saved_bytes < plain.saved_bytes
    assert (on_host.parameter_bytes, on_host.optimizer_state_bytes) == (0, 0)
