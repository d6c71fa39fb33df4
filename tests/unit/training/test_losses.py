"""Losses of outputs, and the one line for an output that has none."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxmem.errors import TraceError, UsageError
from fxmem.training.losses import resolve_loss


def make(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True)


def compute(loss: Any, output: Any) -> Tensor:
    resolved = resolve_loss(loss)
    target = resolved.make_target(output) if resolved.make_target else None
    return resolved.compute(output, target)


@dataclass
class Pair:
    first: Tensor
    second: Tensor | None = None


@pytest.mark.parametrize("output", [SimpleNamespace(loss=make()), {"loss": make(), "x": make(2)}])
def test_an_output_may_bring_its_own_loss(output: Any) -> None:
    own = output["loss"] if isinstance(output, dict) else output.loss
    assert compute(None, output) is own


@pytest.mark.parametrize(
    ("output", "value"),
    [
        (make(2, 3), 6),
        ([make(2), (make(3), {"a": make(4)})], 9),
        (OrderedDict(loss=None, out=make(2), aux=make(1)), 3),
        (Pair(make(2), make(5)), 7),
        (Pair(make(2)), 2),
        ([make(2), torch.ones(7), torch.ones(3, dtype=torch.int64), "text", None], 2),
        ((make(), make()), 2),
    ],
)
def test_else_floating_outputs_are_summed(output: Any, value: int) -> None:
    assert compute(None, output).item() == value


@pytest.mark.parametrize(
    ("shape", "classes_shape"),
    [((4, 10), (4,)), ((2, 5, 10), (10,)), ((2, 10, 3, 4), (2, 3, 4)), ((10,), ())],
)
def test_cross_entropy_makes_class_indices(
    shape: tuple[int, ...], classes_shape: tuple[int, ...]
) -> None:
    loss = resolve_loss("cross_entropy")
    assert loss.make_target is not None
    target = loss.make_target(make(*shape))
    assert (tuple(target.shape), target.dtype) == (classes_shape, torch.int64)
    logits = make(*shape).flatten(0, 1) if len(shape) == 3 else make(*shape)
    assert torch.equal(loss.compute(make(*shape), target), functional.cross_entropy(logits, target))


@pytest.mark.parametrize(
    ("name", "criterion"),
    [
        ("mse", nn.MSELoss()),
        ("l1", nn.L1Loss()),
        ("smooth_l1", nn.SmoothL1Loss()),
        ("bce", nn.BCEWithLogitsLoss()),
    ],
)
def test_losses_of_values_compare_with_a_target_like_the_output(
    name: str, criterion: nn.Module
) -> None:
    output = make(2, 3) * 0.3
    assert torch.equal(compute(name, output), criterion(output, torch.zeros(2, 3)))


def test_named_losses_find_the_logits() -> None:
    output = SimpleNamespace(hidden=make(9, 9), logits=make(4, 10))
    assert torch.equal(compute("cross_entropy", output), compute("cross_entropy", make(4, 10)))
    assert compute("mse", {"out": make(4, 4), "aux": make(2)}).item() == 1


def test_a_function_of_the_output_is_a_loss() -> None:
    def take_mean(output: Tensor) -> Tensor:
        return output.mean()

    assert resolve_loss(take_mean).name == "take_mean"
    assert resolve_loss(take_mean).make_target is None
    assert compute(take_mean, make(4)).item() == 1


GIVE = "give a function of the output, loss=lambda y: y.mean()"


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("CrossEntropyLoss", "unknown loss 'CrossEntropyLoss' (did you mean cross_entropy?)"),
        (
            "huber",
            "unknown loss 'huber' (one of cross_entropy, nll, mse, l1, smooth_l1, bce; "
            "or a function of the output, file.py:function)",
        ),
        (3, f"a loss cannot be 3 ({GIVE})"),
        (nn.MSELoss, f"the loss MSELoss is a class ({GIVE})"),
        (
            nn.MSELoss(),
            "the loss MSELoss cannot be called with the output alone: missing a required "
            "argument: 'target' (wrap it: loss=lambda output: criterion(output, target))",
        ),
    ],
)
def test_what_is_no_loss_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_loss(loss)
    assert str(caught.value) == message


FROZEN = "(is everything frozen, or the output detached? mode='infer' needs no loss)"
FUNCTION = (
    "(in lists, tuples, mappings and dataclasses) (give a function of the output, "
    "--loss file.py:function or loss=; mode='infer' needs no loss)"
)


@pytest.mark.parametrize(
    ("loss", "output", "message"),
    [
        (
            None,
            torch.ones(2, 3),
            f"the model returned a tensor 2x3:float32, and nothing in it requires grad {FROZEN}",
        ),
        (None, None, "the model returned None (does its forward lack a return?)"),
        (
            "mse",
            SimpleNamespace(scores=make(2)),
            "the model returned an object of class SimpleNamespace, and no floating tensor was "
            f"found in it {FUNCTION}",
        ),
        (
            "cross_entropy",
            make(),
            "the model returned a scalar, and this loss needs one value per class "
            "(leave the loss out if it is the loss already)",
        ),
        (
            "mse",
            torch.ones(2),
            f"the loss does not require grad: no parameter leads to it {FROZEN}",
        ),
        (
            lambda output: output.sum().item(),
            make(2),
            "the loss is a float, not a tensor (return the tensor itself, not its .item())",
        ),
        (
            None,
            SimpleNamespace(loss=make(2)),
            "the loss has shape 2, it must be a scalar (take its .mean())",
        ),
    ],
)
def test_an_output_without_a_loss_is_explained(
    loss: str | Callable[[Any], Tensor] | None, output: Any, message: str
) -> None:
    with pytest.raises(TraceError) as caught:
        compute(loss, output)
    assert str(caught.value) == message
