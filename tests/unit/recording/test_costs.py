"""What operators take besides their results."""

from __future__ import annotations

import torch

from fxmem.kernels.cuda import CUDA
from fxmem.kernels.target import Target
from fxmem.recording.costs import KernelCosts
from fxmem.recording.ledger import Ledger
from fxmem.tracing.fakes import make_fake_mode

exp = torch.ops.aten.exp.default


def make_target(device: torch.device) -> Target:
    target = Target("test", device=device)
    target.workspace(exp)(lambda *_: 100)
    target.library(exp)(lambda *_: 200)
    target.keeper(exp)(lambda args: (("its handle", 300),))
    return target


def list_costs(device: torch.device, at: torch.device) -> tuple[object, int]:
    target = make_target(device)
    costs = KernelCosts(target, Ledger(target.device))
    with make_fake_mode():
        x = torch.zeros(4, device=at)
        call = exp, (x,), {}, x
        return costs.estimate_workspace(*call), costs.estimate_library_bytes(*call)


def test_kernels_cost_where_the_target_runs_them() -> None:
    host = torch.device("cpu")
    assert list_costs(host, host) == list_costs(CUDA.device, CUDA.device) == (100, 200)
    assert list_costs(CUDA.device, host) == (0, 0)


def test_what_a_library_keeps_is_named() -> None:
    target = make_target(torch.device("cpu"))
    costs = KernelCosts(target, Ledger(target.device))
    assert costs.list_kept(exp, ()) == (("its handle", 300),)
    assert costs.list_kept(torch.ops.aten.sin.default, ()) == ()


def test_like_calls_have_the_same_flops() -> None:
    costs = KernelCosts(Target("test"), Ledger(torch.device("cpu")))
    mm = torch.ops.aten.mm.default
    with make_fake_mode():
        a, b = torch.zeros(2, 3), torch.zeros(3, 5)
        counted = [costs.count_flops(mm, (a, b), {}, a @ b) for _ in range(2)]
        assert costs.count_flops(exp, (a,), {}, a) == 0
    assert counted == [2 * 2 * 3 * 5] * 2
