"""Forward hooks and segments that run twice: who looks is called once, who changes, again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fxmem
from fxmem.planning.plan import Segment


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def make_plan(model: nn.Module, x: Tensor | None = None) -> fxmem.Plan:
    """Everything but the last layer under one checkpoint."""
    analysis = fxmem.analyze(model, ("3x4" if x is None else x,), device="cpu")
    plan = fxmem.pareto(analysis, time_limit_s=1)[0]
    names = [node.name for node in analysis.nodes]
    segment = Segment(names[1], names[-2], len(names) - 2)
    return fxmem.Plan(plan.fingerprint, 1, 1, segments=(segment,), fx_graph=analysis.fx_graph)


def take_gradients(run: nn.Module, x: Tensor) -> list[Tensor]:
    run.zero_grad()
    run(x).square().sum().backward()
    return [p.grad.clone() for p in run.parameters() if p.grad is not None]


def test_a_hook_that_looks_is_called_once() -> None:
    model, x = Net(), torch.randn(3, 4, requires_grad=True)
    planned = fxmem.apply(model, make_plan(model, x))
    seen: list[str] = []
    linear = model.first.linear
    linear.register_forward_pre_hook(lambda *_: seen.append("before"))
    linear.register_forward_hook(
        lambda module, args, kwargs, output: seen.append("after"), with_kwargs=True
    )
    linear.register_full_backward_hook(lambda *_: seen.append("backward"))
    expected = take_gradients(model, x)
    assert seen == ["before", "after", "backward"]
    seen.clear()
    assert all(map(torch.equal, take_gradients(planned, x), expected))
    assert seen == ["before", "after", "backward"]


def test_a_naive_checkpoint_calls_it_again() -> None:
    model, x = Net(), torch.randn(3, 4)
    seen: list[str] = []
    model.first.linear.register_forward_hook(lambda *_: seen.append("after"))
    model.last(torch_checkpoint(model.first, x, use_reentrant=False)).sum().backward()
    assert seen == ["after", "after"]


def double_result(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def double_in_place(module: nn.Module, args: Any, output: Tensor) -> None:
    output.mul_(2)


def double_memory(module: nn.Module, args: Any, output: Tensor) -> None:
    output.data.mul_(2)  # which autograd's count of versions leaves out


def draw_and_forget(module: nn.Module, args: Any, output: Tensor) -> None:
    torch.rand(3)


@pytest.mark.parametrize("hook", [double_result, double_in_place, double_memory, draw_and_forget])
def test_a_hook_that_changes_is_called_in_both_runs(hook: Any) -> None:
    model, x = Net(), torch.randn(3, 4)
    planned = fxmem.apply(model, make_plan(model))
    calls = []

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return hook(*arguments)

    model.first.linear.register_forward_hook(counted)
    expected = take_gradients(model, x)
    assert all(map(torch.equal, take_gradients(planned, x), expected))
    assert len(calls) == 3


def test_hooks_may_leave_and_come_while_the_model_runs() -> None:
    model, x = Net(), torch.randn(3, 4)
    planned = fxmem.apply(model, make_plan(model))
    linear = model.first.linear
    seen: list[str] = []

    def leave(*_: Any) -> None:
        seen.append("leaves")
        handle.remove()
        linear.register_forward_hook(lambda *_: seen.append("stays"))

    handle = linear.register_forward_hook(leave)
    take_gradients(planned, x)
    take_gradients(planned, x)
    assert seen == ["leaves", "stays"]
    assert len(linear._forward_hooks) == 1


def test_hooks_are_themselves_again_after_an_error() -> None:
    model = Net()
    planned = fxmem.apply(model, make_plan(model))

    def refuse(*_: Any) -> None:
        raise KeyError("refused")

    model.first.linear.register_forward_hook(refuse)
    with pytest.raises(KeyError, match="refused"):
        planned(torch.randn(3, 4))
    assert [*model.first.linear._forward_hooks.values()] == [refuse]


def test_hooks_of_the_model_itself_are_called() -> None:
    model, x = Net(), torch.randn(3, 4)
    planned = fxmem.apply(model, make_plan(model))
    seen: list[str] = []
    model.register_forward_hook(lambda *_: seen.append("model"))
    planned.register_forward_pre_hook(lambda *_: seen.append("planned"))
    for run in (model, planned, planned.eval()):
        run(x)
    assert seen == ["planned", "model"] * 3


def test_a_hook_on_all_modules_is_called_once_for_each_call() -> None:
    model, x = Net(), torch.randn(3, 4, requires_grad=True)
    segment = Segment("first.linear", "first.sin", 2, fqn="first")
    planned = fxmem.apply(model, fxmem.Plan("", 1, 1, segments=(segment,), style="modules"))
    seen: list[type] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: seen.append(type(module))
    )
    try:
        expected = take_gradients(model, x)
        plain = [*seen]
        seen.clear()
        found = take_gradients(planned, x)
    finally:
        handle.remove()
    assert seen == plain == [nn.Linear, Block, nn.Linear, Net]
    assert all(map(torch.equal, found, expected))
