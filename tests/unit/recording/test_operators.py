"""Operators: results, costs, arguments that can be overwritten, mixed dtypes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from running import Runs
from torch import Tensor, nn
from torch.nn import functional

import fxmem
from fxmem.fakes.fake_mode import make_fake_mode
from fxmem.kernels.cuda import CUDA
from fxmem.kernels.registry import Backend, OperatorCall
from fxmem.recording.ledger import Ledger
from fxmem.recording.operators import OperatorRunner, check_dtypes, find_overwritable
from fxmem.recording.size_hints import SizeHints

aten = torch.ops.aten


def make_runner(target: Backend) -> OperatorRunner:
    return OperatorRunner(target, Ledger(target.device), SizeHints())


def run(runner: OperatorRunner, func: Any, *args: Any, **kwargs: Any) -> Any:
    return runner.run(func, args, kwargs, by_user=True)


def test_a_kernel_of_the_target_comes_before_pytorch_s() -> None:
    target = Backend("test")
    target.kernel(aten.exp.default)(lambda x: x.new_empty(7) if x.dim() == 1 else NotImplemented)
    runner = make_runner(target)
    with make_fake_mode():
        assert run(runner, aten.exp.default, torch.zeros(4)).shape == (7,)
        assert run(runner, aten.exp.default, torch.zeros(4, 4)).shape == (4, 4)


def test_nothing_is_computed_for_a_result_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """As inductor calls products in float8; they have no fake kernel for a given result."""
    fake_tensor = "torch._subclasses.fake_tensor"
    monkeypatch.setattr(f"{fake_tensor}.run_fallback_kernel", lambda *_: pytest.fail("computed"))
    with make_fake_mode():
        a, b = (torch.zeros(32, 32).to(torch.float8_e4m3fn) for _ in range(2))
        scale, out = torch.ones(()), torch.zeros(32, 32, dtype=torch.bfloat16)
        scaled = aten._scaled_mm.out
        result = run(make_runner(Backend("cpu")), scaled, a, b.t(), scale, scale, out=out)
    assert result is out


def test_what_is_computed_with_a_scalar_stays_on_the_device() -> None:
    """FakeTensorMode leaves the result of two scalars whose values it knows on the host."""
    with make_fake_mode():
        on_gpu = torch.tensor(2.0)
        on_gpu.fake_device = CUDA.device
        assert run(make_runner(CUDA), aten.add.Tensor, on_gpu, 1).device == CUDA.device


exp = torch.ops.aten.exp.default


def make_target(device: torch.device) -> Backend:
    target = Backend("test", device=device)
    target.workspace(exp)(lambda *_: 100)
    target.library(exp)(lambda *_: 200)
    target.keeper(exp)(lambda args: (("its handle", 300),))
    return target


def list_costs(device: torch.device, at: torch.device) -> tuple[object, int]:
    target = make_target(device)
    runner = make_runner(target)
    with make_fake_mode():
        x = torch.zeros(4, device=at)
        call = OperatorCall((x,), {}, x)
        return runner.estimate_workspace(exp, call), runner.estimate_library_bytes(exp, call)


def test_kernels_cost_where_the_target_runs_them() -> None:
    host = torch.device("cpu")
    assert list_costs(host, host) == list_costs(CUDA.device, CUDA.device) == (100, 200)
    assert list_costs(CUDA.device, host) == (0, 0)


X = torch.zeros(2, 3)
LEAF = torch.zeros(2, 3, requires_grad=True)


@pytest.mark.parametrize(
    ("args", "kwargs", "positions"),
    [
        ((X, 1), {}, [0]),
        ((X, X.clone()), {}, [0, 1]),
        ((X, X.clone()), {"alpha": 2}, [0]),
        ((X, torch.zeros(3)), {}, [0]),
        ((torch.zeros(3), X), {}, [1]),
        ((X, torch.zeros(3, 2).t()), {}, [0]),  # its strides are others
        ((torch.zeros(2, 4)[:, :3], X), {}, [1]),  # not all of its storage
        ((torch.zeros(3).expand(2, 3), X), {}, [1]),
        ((X.int(), X), {}, [1]),
        ((LEAF, X), {}, [1]),
        ((LEAF * 1, X), {}, [0, 1]),
        (((LEAF * 1).view(2, 3), X), {}, [1]),
        ((X.view(2, 3), X.clone()), {}, [0, 1]),  # a view, but nothing is recorded
    ],
)
def test_fits(args: tuple[object, ...], kwargs: dict[str, int], positions: list[int]) -> None:
    result = torch.add(*args, **kwargs)  # type: ignore[arg-type]
    found = [*find_overwritable(args, kwargs, result)]
    assert [next(i for i, a in enumerate(args) if a is f) for f in found] == positions


def test_nothing_fits_where_the_result_is_no_plain_tensor() -> None:
    assert not [*find_overwritable((X,), {}, X.max(1))]
    assert not [*find_overwritable((X,), {}, X.to_sparse())]
    with torch.no_grad():
        assert [*find_overwritable((LEAF,), {}, LEAF + 1)]


Make = Callable[..., Tensor]


def list_conv(x: Make, w: Make, *, transposed: bool) -> tuple[Any, ...]:
    return (x(1, 2, 5), w(2, 2, 3), None, [1], [0], [1], transposed, [0], 1)


OPERATORS: dict[str, tuple[Any, Callable[[Make, Make], tuple[Any, ...]]]] = {
    "mm": (aten.mm.default, lambda x, w: (x(2, 3), w(3, 4))),
    "addmm": (aten.addmm.default, lambda x, w: (w(4), x(2, 3), w(3, 4))),
    "mv": (aten.mv.default, lambda x, w: (w(2, 3), x(3))),
    "addmv": (aten.addmv.default, lambda x, w: (w(2), w(2, 3), x(3))),
    "convolution": (aten.convolution.default, lambda x, w: list_conv(x, w, transposed=False)),
    "transposed": (aten.convolution.default, lambda x, w: list_conv(x, w, transposed=True)),
}
FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(("first", "second"), [*itertools.product(FLOATING, FLOATING)])
def test_what_real_tensors_do(name: str, first: torch.dtype, second: torch.dtype) -> None:
    operator, make_arguments = OPERATORS[name]
    arguments = make_arguments(
        lambda *shape: torch.ones(shape, dtype=first),
        lambda *shape: torch.ones(shape, dtype=second),
    )
    assert fails(check_dtypes, operator, arguments) == fails(operator, *arguments)


def fails(call: Callable[..., Any], *arguments: Any) -> bool:
    try:
        call(*arguments)
    except RuntimeError:
        return True
    return False


def test_a_linear_layer_refuses_integers_and_names_the_line() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        return functional.relu(model.linear(x))

    with pytest.raises(fxmem.TraceError) as caught:
        fxmem.analyze(Runs(run, linear=nn.Linear(4, 4)), ("2x4:int64",), device="cpu")
    line = run.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        f"the step failed at test_operators.py:{line}: RuntimeError: two tensors must have the "
        "same dtype, but got int64 and float32 (check shapes and dtypes of the inputs: 2x4:int64)"
    )
