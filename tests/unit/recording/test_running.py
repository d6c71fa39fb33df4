"""Results of operators: the target's kernels, known values, a hint, or PyTorch's fake kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from fxmem.kernels.cuda import CUDA
from fxmem.kernels.target import Target
from fxmem.recording.ledger import Ledger
from fxmem.recording.running import OperatorRunner
from fxmem.tracing.fakes import make_fake_mode

aten = torch.ops.aten


def make_runner(target: Target, size_hint: int | None = None) -> OperatorRunner:
    return OperatorRunner(target, Ledger(target.device), size_hint)


def run(runner: OperatorRunner, func: Any, *args: Any, **kwargs: Any) -> Any:
    return runner.run(func, args, kwargs, in_forward=True)


def test_a_kernel_of_the_target_comes_before_pytorch_s() -> None:
    target = Target("test")
    target.kernel(aten.exp.default)(lambda x: x.new_empty(7) if x.dim() == 1 else NotImplemented)
    runner = make_runner(target)
    with make_fake_mode():
        assert run(runner, aten.exp.default, torch.zeros(4)).shape == (7,)
        assert run(runner, aten.exp.default, torch.zeros(4, 4)).shape == (4, 4)


def test_a_hint_says_how_many_are_found() -> None:
    with make_fake_mode():
        x = torch.zeros(4)
        assert run(make_runner(Target("test"), 3), aten.nonzero.default, x).shape == (3, 1)
        with pytest.raises(DynamicOutputShapeException):
            run(make_runner(Target("test")), aten.nonzero.default, x)


def test_lines_that_look_at_a_random_number_are_kept() -> None:
    runner = make_runner(Target("test"))
    with make_fake_mode():
        drawn = run(runner, aten.rand.default, [])
        assert run(runner, aten._local_scalar_dense.default, drawn) == 0.5
    assert len(runner.draws) == 1


def test_what_is_computed_with_a_scalar_stays_on_the_device() -> None:
    """FakeTensorMode leaves the result of two scalars whose values it knows on the host."""
    with make_fake_mode():
        on_gpu = torch.tensor(2.0)
        on_gpu.fake_device = CUDA.device
        assert run(make_runner(CUDA), aten.add.Tensor, on_gpu, 1).device == CUDA.device
