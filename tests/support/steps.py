"""Steps of a model on real tensors, and whether what they leave is equal to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases import SEED
from benchmarks.step import default_loss, tensors_of


def sum_squares(output: Any) -> Tensor:
    """A loss whose gradient depends on the output."""
    return sum((t.float().square().mean() for t in tensors_of(output)), torch.zeros(()))


def take_step(
    model: nn.Module,
    args: tuple[Any, ...],
    *,
    train: bool = True,
    loss_of: Callable[[Any], Tensor] = default_loss,
) -> list[Any]:
    """Takes a step from the same random numbers each time, and lists its results.

    Returns:
        Results; in training the loss, and the gradients of parameters and inputs, None where there
        is none; buffers, inputs and the next random number.
    """
    args = copy.deepcopy(args)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(SEED)
    with torch.set_grad_enabled(train):
        output = model.train(train)(*args)
    left: list[Any] = []
    if train:
        loss = loss_of(output)
        loss.backward()
        left = [loss, *(t.grad for t in (*model.parameters(), *tensors_of(args)))]
    return [
        *tensors_of(output),
        *left,
        *map(torch.clone, model.buffers()),
        *tensors_of(args),
        torch.rand(1),
    ]


def are_equal(ours: list[Any], theirs: list[Any]) -> bool:
    """Tells whether two steps left the same behind, to the bit; one NaN is like another."""

    def equal(a: Tensor | None, b: Tensor | None) -> bool:
        if a is None or b is None:
            return a is b
        same = (a.dtype, a.shape) == (b.dtype, b.shape)
        return same and torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num())

    return len(ours) == len(theirs) and all(map(equal, ours, theirs))


def check_same_step(model: nn.Module, planned: nn.Module, *args: Any, **options: Any) -> None:
    """Asserts that a step leaves the same with a plan, of a model that shares its state with it."""
    state = copy.deepcopy(model.state_dict())
    expected = take_step(model, args, **options)
    model.load_state_dict(state)
    assert are_equal(expected, take_step(planned, args, **options))


def train_steps(model: nn.Module, batches: Iterable[Tensor]) -> list[Tensor]:
    """Takes a step for each batch.

    Returns:
        Outputs, state, the last gradients, and the state of the random generator.
    """
    torch.manual_seed(5)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    left: list[Tensor] = []
    for batch in batches:
        optimizer.zero_grad()
        output = model(batch)
        sum_squares(output).backward()
        optimizer.step()
        left += [tensor.detach().clone() for tensor in tensors_of(output)]
    left += [value.detach().clone() for value in model.state_dict().values()]
    left += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*left, torch.get_rng_state()]
