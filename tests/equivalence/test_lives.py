"""Lives of planned models after they were made: the same bits as for the model itself."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from leanest import plan_leanest
from planned_models import Attention, Residual, Stages
from steps import train_steps
from torch import Tensor, nn

import fxmem

ROOT = Path(__file__).parents[2]
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (Residual, (4, 3, 16, 16)),
    "attention": (Attention, (4, 8, 16)),
}
TRAIN = """
import sys, torch
from steps import train_steps
model, x = torch.load(sys.argv[1], weights_only=False), torch.load(sys.argv[2])
torch.save(train_steps(model, (x, x[:-1])), sys.argv[3])
"""


def take_steps(model: nn.Module, x: Tensor) -> list[Tensor]:
    return train_steps(model, (x, x[:-1]))


def check_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.fixture(params=["graph", "modules"])
def style(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@functools.cache
def make_plan(name: str, style: str) -> fxmem.Plan:
    make, shape = MODELS[name]
    return plan_leanest(Stages(make), (torch.randn(shape),), style=style)


@pytest.fixture(params=MODELS)
def pair(request: pytest.FixtureRequest, style: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """A model, a copy of it with a plan, and an input."""
    torch.manual_seed(0)
    make, shape = MODELS[request.param]
    model = Stages(make)
    planned = fxmem.apply(copy.deepcopy(model), make_plan(request.param, style))
    return model, planned, torch.randn(shape)


def test_training_a_copy_leaves_the_other(pair: tuple[nn.Module, nn.Module, Tensor]) -> None:
    model, planned, x = pair
    copied = copy.deepcopy(planned)
    check_same(take_steps(copied, x), take_steps(copy.deepcopy(model), x))
    before, after = model.state_dict(), planned.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in planned.parameters())
    check_same(take_steps(planned, x), take_steps(model, x))


@pytest.mark.parametrize("pair", ["attention"], indirect=True)
def test_a_file_is_read_by_another_process(
    pair: tuple[nn.Module, nn.Module, Tensor], tmp_path: Path
) -> None:
    model, planned, x = pair
    paths = [tmp_path / name for name in ("model.pt", "x.pt", "left.pt")]
    torch.save(planned, paths[0])
    torch.save(x, paths[1])
    here = [str(ROOT), str(ROOT / "tests" / "support")]
    done = subprocess.run(
        [sys.executable, "-W", "error::fxmem.FxmemWarning", "-c", TRAIN, *map(str, paths)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join(here)},  # as many threads as here
    )
    assert done.returncode == 0, done.stderr
    check_same(torch.load(paths[2]), take_steps(model, x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_dtype(pair: tuple[nn.Module, nn.Module, Tensor], dtype: torch.dtype) -> None:
    model, planned, x = pair
    assert planned.to(dtype) is planned
    model.to(dtype)
    assert {p.dtype for p in planned.parameters()} == {dtype}
    is_graph = planned.plan.style == "graph"  # of float32: the model's own forward runs
    told = pytest.warns(fxmem.FxmemWarning, match="another dtype") if is_graph else nullcontext()
    with told:
        steps = take_steps(planned, x.to(dtype))
    check_same(steps, take_steps(model, x.to(dtype)))


@pytest.mark.parametrize("frozen", [[1, 2], [0, 1, 2]])
def test_parameters_frozen_afterwards(
    pair: tuple[nn.Module, nn.Module, Tensor], frozen: list[int]
) -> None:
    model, planned, x = pair
    for net in (model, planned):
        for stage in frozen:
            first, *_ = net.get_submodule(f"stages.{stage}").children()
            if len(frozen) < 3:
                first = net.get_submodule(f"stages.{stage}")
            first.requires_grad_(False)
            assert not any(p.requires_grad for p in first.parameters())
    check_same(take_steps(planned, x), take_steps(model, x))
    for net in (model, planned):
        net.requires_grad_(True)
    check_same(take_steps(planned, x), take_steps(model, x))
