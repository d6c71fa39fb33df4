"""Every named optimizer on parameters without values: it runs, and its state is as large."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch._subclasses.fake_tensor import DataDependentOutputException

from fxmem.errors import UsageError
from fxmem.fakes.fake_mode import make_fake_mode
from fxmem.fakes.swapping import swap_in_fakes
from fxmem.training.optimizers import OPTIMIZERS, Adam8bit, resolve_optimizer


def run_steps(name: str, *, on_fakes: bool) -> dict[str, list[int]]:
    """Bytes of each entry of the state after two steps."""
    with_bias = not name.startswith("muon")  # which takes matrices only
    model: nn.Module = nn.Sequential(
        nn.Linear(4, 8, bias=with_bias), nn.Linear(8, 8, bias=with_bias)
    )
    make = resolve_optimizer(name)
    assert make is not None
    with contextlib.ExitStack() as stack:
        if on_fakes:
            mode = stack.enter_context(make_fake_mode())
            stack.enter_context(swap_in_fakes(model, mode, train=True))
        optimizer = make(list(model.parameters()))
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    sizes: dict[str, list[int]] = {}
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                sizes.setdefault(key, []).append(value.untyped_storage().nbytes())
    return sizes


NO_FOREACH = ("muon", "adam8bit")


@pytest.mark.parametrize(
    "name",
    [*OPTIMIZERS, *(f"{name}(foreach=True)" for name in OPTIMIZERS if name not in NO_FOREACH)],
)
def test_state_on_fakes_is_as_large_as_real_state(name: str) -> None:
    real = run_steps(name, on_fakes=False)
    assert run_steps(name, on_fakes=True) == real
    assert bool(real) == (name.partition("(")[0] != "sgd")


@pytest.mark.parametrize("choice", [optim.AdamW, lambda params: optim.AdamW(params, lr=0.1)])
def test_a_class_or_a_function_makes_it(choice: Any) -> None:
    make = resolve_optimizer(choice)
    assert make is not None
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    trained = nn.Parameter(torch.ones(3))
    optimizer = make([frozen, trained])
    assert isinstance(optimizer, optim.AdamW)
    assert optimizer.param_groups[0]["params"] == [trained]


@pytest.mark.parametrize(
    ("dtype", "answer"), [(torch.float32, 1.0), (torch.int64, 1), (torch.bool, True)]
)
def test_values_are_answered_within_a_step_alone(dtype: torch.dtype, answer: object) -> None:
    class Asking(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return torch.ones(3).to(dtype).max().item()

    make = resolve_optimizer(Asking)
    assert make is not None
    with make_fake_mode():
        got = make([nn.Parameter(torch.ones(2))]).step()
        assert (got, type(got)) == (answer, type(answer))
        with pytest.raises(DataDependentOutputException):
            torch.ones(3).max().item()


PARAMETER = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("Adem", "unknown optimizer 'Adem' (did you mean adam or radam or nadam?)"),
        (
            "zz",
            f"unknown optimizer 'zz' (one of {', '.join(OPTIMIZERS)}; or what makes one, "
            "file.py:function)",
        ),
        (
            "adam(fused=yes)",
            "cannot read the optimizer's settings in 'adam(fused=yes)' "
            "(names and literals, e.g. 'adam(fused=True, lr=1e-3)')",
        ),
        (
            "adam(0.1)",
            "cannot read the optimizer's settings in 'adam(0.1)' "
            "(names and literals, e.g. 'adam(fused=True, lr=1e-3)')",
        ),
        (
            "sgd(fast=True)",
            "the optimizer sgd(fast=True) does not take these parameters: SGD.__init__() got an "
            "unexpected keyword argument 'fast' "
            "(give a function of the parameters that makes it)",
        ),
        (
            3,
            "optimizer must be a name, a class or a function, got 3 "
            "(a function takes the parameters)",
        ),
        (
            optim.SGD([PARAMETER]),
            "the optimizer SGD holds parameters already "
            "(give a function of the parameters: lambda params: AdamW(params, lr=1e-3))",
        ),
        (
            optim.LBFGS,
            "the optimizer LBFGS runs the model again in its step, through a closure "
            "(one that needs no closure, e.g. adamw)",
        ),
        (
            lambda params: 3,
            "the optimizer <lambda> must be an Optimizer, got int (return the optimizer)",
        ),
        (
            "muon",
            "the optimizer muon does not take these parameters: Muon only supports 2D parameters "
            "whereas we found a parameter with size: torch.Size([3]) "
            "(give a function of the parameters that makes it)",
        ),
    ],
)
def test_what_is_no_optimizer_is_refused(choice: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_optimizer(choice)([PARAMETER])  # type: ignore[misc]
    assert str(caught.value) == message


def test_nothing_to_train_is_said() -> None:
    make = resolve_optimizer("sgd")
    assert make is not None
    with pytest.raises(UsageError) as caught:
        make([nn.Parameter(torch.ones(1), requires_grad=False)])
    assert str(caught.value) == (
        "the optimizer sgd has nothing to train: no parameter requires grad "
        "(optimizer=None, or mode='infer')"
    )


# Bytes by the formula of bitsandbytes.
@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [
        ((1000,), 2 * 4 * 1000),  # below 4096 elements: two states of float32
        ((64, 64), 2 * (4096 + 4 * 16)),  # two bytes an element, two scales a block of 256
        ((5000,), 2 * (5000 + 4 * 20)),  # 19.5 blocks
    ],
)
def test_states_are_as_large_as_by_formula(shape: tuple[int, ...], nbytes: int) -> None:
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.zeros(shape)
    optimizer = Adam8bit([parameter])
    optimizer.step()
    state = optimizer.state[parameter]
    own = [value for key, value in state.items() if not key.startswith("qmap")]
    assert sum(value.nbytes for value in own) == nbytes
