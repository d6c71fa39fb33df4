"""Hooks, attributes and gradients of tensors, on their fake copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fxmem.tracing.deepcopy import find_accumulator
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fxmem.errors import FxmemWarning, TraceError
from fxmem.tracing.fakes import make_fake_inputs, make_fake_mode, make_fake_model


@pytest.fixture
def fake_mode() -> FakeTensorMode:
    return make_fake_mode()


def step(model: nn.Module, fake_mode: FakeTensorMode) -> None:
    with fake_mode:
        model(torch.ones(1, 2)).sum().backward()


def hook_optimizer(model: nn.Linear, optimizers: dict[Any, torch.optim.Optimizer]) -> None:
    """The optimizer in backward, as in PyTorch's tutorial of that name."""

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        optimizers[parameter] = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        parameter.register_post_accumulate_grad_hook(update)


def test_a_hook_steps_the_copys_optimizer_and_not_the_users(fake_mode: FakeTensorMode) -> None:
    model, optimizers = nn.Linear(2, 2), {}
    hook_optimizer(model, optimizers)
    before = model.weight.detach().clone()
    fake = make_fake_model(model, fake_mode, train=True)
    (hook,) = fake.weight._post_accumulate_grad_hooks.values()
    copied = hook.__closure__[0].cell_contents
    step(fake, fake_mode)
    assert fake.weight.grad is None
    assert set(copied) == set(fake.parameters())
    assert isinstance(copied[fake.weight].state[fake.weight]["momentum_buffer"], FakeTensor)
    assert all(not optimizer.state for optimizer in optimizers.values())
    assert model.weight.grad is None and torch.equal(model.weight, before)


def test_hooks_run_in_order_and_one_that_was_removed_does_not(fake_mode: FakeTensorMode) -> None:
    model, calls = nn.Linear(2, 2), []
    model.calls = calls
    model.weight.register_hook(lambda grad: calls.append("first"))
    model.weight.register_hook(lambda grad: calls.append("removed")).remove()
    model.weight.register_hook(lambda grad: calls.append("second") or grad * 2)
    model.weight.register_post_accumulate_grad_hook(lambda p: calls.append("after"))
    fake = make_fake_model(model, fake_mode, train=True)
    step(fake, fake_mode)
    assert fake.calls == ["first", "second", "after"]
    assert calls == []


def test_a_handle_removes_the_hook_of_the_copy(fake_mode: FakeTensorMode) -> None:
    model = nn.Linear(2, 2)
    model.handle = model.weight.register_hook(lambda grad: grad * 2)
    fake = make_fake_model(model, fake_mode, train=True)
    fake.handle.remove()
    assert not fake.weight._backward_hooks
    assert len(model.weight._backward_hooks) == 1


@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_hooks_of_the_accumulating_node_are_copied(
    fake_mode: FakeTensorMode, register: str
) -> None:
    model, calls = nn.Linear(2, 2), []
    model.calls = calls
    node = find_accumulator(model.weight)
    handle = getattr(node, register)(lambda *_: calls.append(1))
    fake = make_fake_model(model, fake_mode, train=True)
    step(fake, fake_mode)
    assert (fake.calls, calls) == ([1], [])
    assert list(handle.hooks_dict_ref()) == [handle.id]


def test_a_hook_that_cannot_be_copied_is_told_and_not_run(fake_mode: FakeTensorMode) -> None:
    model, stream = nn.Sequential(nn.Linear(2, 2)), (number for number in range(3))

    def shrink(grad: Tensor) -> Tensor:
        return grad * model[0].weight * next(stream)

    model[0].weight.register_hook(shrink)
    with pytest.warns(FxmemWarning) as caught:
        fake = make_fake_model(model, fake_mode, train=True)
    assert [str(warning.message) for warning in caught] == [
        "the hook test_a_hook_that_cannot_be_copied_is_told_and_not_run.<locals>.shrink of "
        "'0.weight' is not run, as it cannot be copied: TypeError: cannot pickle 'generator' object"
    ]
    step(fake, fake_mode)
    assert next(stream) == 0


def test_attributes_are_copied_with_what_they_reach(fake_mode: FakeTensorMode) -> None:
    model = nn.Linear(2, 2)
    weight: Any = model.weight
    weight.optimizer = torch.optim.SGD([model.weight], lr=0.1)
    weight.stream = (number for number in range(3))
    fake = make_fake_model(model, fake_mode, train=True)
    assert fake.weight.optimizer.param_groups[0]["params"] == [fake.weight]
    assert fake.weight.stream is weight.stream
    again = make_fake_model(fake, fake_mode, train=True)
    assert again.weight.optimizer.param_groups[0]["params"] == [again.weight]
    weight.pair = (model.weight, (number for number in range(3)))
    with pytest.raises(TraceError, match="what is set on 'weight' cannot be copied: TypeError"):
        make_fake_model(model, fake_mode, train=True)


def test_inputs_keep_their_hooks(fake_mode: FakeTensorMode) -> None:
    calls: list[int] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad, seen=calls: grad * 2)
    x.register_post_accumulate_grad_hook(lambda x: setattr(x, "grad", None))
    (fake,), _ = make_fake_inputs([x], {}, fake_mode)
    fake.sum().backward()
    assert fake.grad is None
    assert len(fake._backward_hooks) == 1


class Scaled(nn.Parameter):
    """A parameter with a method and a say in what is computed from it."""

    seen: list[Callable[..., Any]] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})

    def scale(self) -> int:
        return 2


def test_a_subclass_stays_one(fake_mode: FakeTensorMode) -> None:
    model = nn.Linear(2, 2)
    model.weight = Scaled(model.weight.detach())
    fake = make_fake_model(model, fake_mode, train=True)
    again = make_fake_model(fake, fake_mode, train=True)
    for copied in (fake, again):
        assert isinstance(copied.weight, Scaled) and isinstance(copied.weight, FakeTensor)
        assert copied.weight.scale() == 2
        Scaled.seen.clear()
        step(copied, fake_mode)
        assert nn.functional.linear in Scaled.seen
        assert type(copied.weight.grad) is FakeTensor
