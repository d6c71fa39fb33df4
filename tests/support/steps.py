"""One step of a model on real tensors, and whether two of them are equal to the bit."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases import SEED
from benchmarks.step import default_loss, tensors_of


def take_step(model: nn.Module, args: tuple[Any, ...], *, train: bool = True) -> list[Any]:
    """What a step leaves behind, from the same random numbers each time.

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
        loss = default_loss(output)
        loss.backward()
        left = [loss, *(t.grad for t in (*model.parameters(), *tensors_of(args)))]
    return [*tensors_of(output), *left, *model.buffers(), *tensors_of(args), torch.rand(1)]


def are_equal(ours: list[Any], theirs: list[Any]) -> bool:
    """Whether two steps left the same behind, to the bit; one NaN is like another."""

    def equal(a: Tensor | None, b: Tensor | None) -> bool:
        if a is None or b is None:
            return a is b
        same = (a.dtype, a.shape) == (b.dtype, b.shape)
        return same and torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num())

    return len(ours) == len(theirs) and all(map(equal, ours, theirs))
