"""Kernels in Triton: a launch allocates nothing, and computes nothing on fake tensors."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from cuda_steps import made, saved
from running import Call
from torch import Tensor

import fxmem
from fxmem import FxmemError, Phase
from fxmem.kernels.cuda import CUDA
from fxmem.kernels.cuda.gpu import Gpu, use_gpu
from fxmem.kernels.functions import lower_functions

BF16 = torch.bfloat16
_JIT = "triton.runtime.jit"


class _Kernel:
    """``triton.runtime.jit.KernelInterface``: jitted functions, autotuners and heuristics."""

    def __init__(self) -> None:
        self.launched: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.launched.append((grid, args, kwargs))


class _Driver:
    active: Any = None

    def set_active(self, driver: Any) -> None:
        self.active = driver


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Kernel]:
    """A kernel of a Triton that is installed in name only."""
    with contextlib.suppress(ImportError):
        importlib.import_module("triton")  # one that is installed imports its own modules
    jit: Any = ModuleType(_JIT)
    jit.KernelInterface, jit.driver = _Kernel, _Driver()
    monkeypatch.setitem(sys.modules, _JIT, jit)
    launch = _Kernel.__getitem__
    yield _Kernel()
    assert _Kernel.__getitem__ is launch and jit.driver.active is None


def test_a_launch_on_fake_tensors_only_loses_their_values(kernel: _Kernel) -> None:
    def add_one(x: Tensor) -> Tensor:
        made = torch.zeros((), device=x.device, dtype=torch.int64)
        assert made.item() == 0
        kernel[(1,)](x, out_ptr=[made], BLOCK=128)
        if made.item():  # what the kernel has written
            x = x + 1
        return x

    with pytest.raises(FxmemError, match=r"if made.item\(\)"):
        fxmem.analyze(Call(add_one), ("2x3",), mode="infer")
    analysis = fxmem.analyze(Call(add_one), ("2x3",), mode="infer", size_hint=0)
    assert not kernel.launched and not analysis.graph.operations[-1].workspace_bytes


def test_a_launch_on_real_tensors_is_triton_s(kernel: _Kernel) -> None:
    """Its driver is that of the machine, and that of fakes the GPU's which is asked for."""
    driver, real = sys.modules[_JIT].driver, torch.ones(2)
    with use_gpu(Gpu((9, 0), multiprocessors=132)), lower_functions(CUDA):
        kernel[(2,)](real, n=2)
        target = driver.active.get_current_target()
        properties = driver.active.utils.get_device_properties(0)
        device = driver.active.get_active_torch_device()
        driver.active.get_benchmarker()  # where Triton 3.3 makes an autotuner
    assert kernel.launched == [((2,), (real,), {"n": 2})]
    assert (target.backend, target.arch, target.warp_size) == ("cuda", 90, 32)
    assert properties["multiprocessor_count"] == 132
    assert properties["max_shared_mem"] == 232448  # 227 KiB: the CUDA programming guide
    assert device == torch.device("cuda", 0)


def test_kernels_of_liger_hold_what_their_callers_allocate() -> None:
    """By hand from liger_kernel/ops/rms_norm.py and swiglu.py, of version 0.8."""
    pytest.importorskip("liger_kernel")
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    from liger_kernel.transformers import LigerRMSNorm

    rows, columns = 64, 256
    x = torch.randn(rows, columns, dtype=BF16, requires_grad=True)
    model = LigerRMSNorm(columns).to(BF16)
    graph = fxmem.analyze(model, (x,), gpu="h100").graph
    # The reciprocal of each row's root is kept; dx overwrites dy.
    assert saved(graph) == [((rows,), "float32")]
    assert made(graph) == [("empty", rows * columns * 2), ("empty", rows * 4)]
    # Each multiprocessor sums up the gradient of the weight for its rows, in float32.
    sums = [("empty", 132 * columns * 4), ("sum", columns * 4), ("_to_copy", columns * 2)]
    seed = [("ones_like", 2), ("clone", rows * columns * 2)]
    assert made(graph, Phase.BACKWARD) == [*seed, *sums]

    swiglu, other = Call(LigerSiLUMulFunction.apply), x.detach().clone().requires_grad_()
    graph = fxmem.analyze(swiglu, (x, other), gpu="h100").graph
    # The gradients overwrite both inputs, which are saved.
    assert made(graph) == [("empty_like", rows * columns * 2)] and saved(graph) == []
    assert made(graph, Phase.BACKWARD) == seed
