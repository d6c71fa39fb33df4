"""Which function saves what: autograd numbers a function before it saves anything."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxmem.recording.saving import SaveLog, is_own_output


def watch(function: Callable[[Tensor], Tensor]) -> tuple[SaveLog, list[bool], Tensor]:
    """What a function of a leaf saves, and whether each is its own output."""
    log, own = SaveLog(), []

    def pack(tensor: Tensor) -> Tensor:
        own.append(is_own_output(tensor.grad_fn))
        log.add(len(own) - 1, tensor, tensor.grad_fn, 0, 1)
        return tensor.detach()

    x = torch.zeros(4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return log, own, function(x)


def test_an_argument_is_saved_by_the_function_that_is_made() -> None:
    log, own, result = watch(torch.sin)
    assert [save.sequence for save in log.saves] == [result.grad_fn._sequence_nr()]
    assert own == [False]


def test_an_output_is_saved_by_its_maker() -> None:
    log, own, result = watch(torch.exp)
    assert [save.sequence for save in log.saves] == [result.grad_fn._sequence_nr()]
    assert own == [True]


@pytest.mark.parametrize("function", [Tensor.sin_, Tensor.cos_])
def test_in_place_a_copy_is_saved_that_has_a_number_too(
    function: Callable[[Tensor], Tensor],
) -> None:
    log, _, result = watch(lambda x: function(x * 2))
    assert log.saves[-1].sequence == result.grad_fn._sequence_nr()


def test_a_storage_is_listed_once_however_often_it_is_saved() -> None:
    log = SaveLog()
    for tensor in (torch.zeros(4), torch.zeros(2, 2)):
        log.add(3, tensor, None, 1, 9)
    assert [(s.storage, s.node, s.position) for s in log.saves] == [(3, 1, 9)] * 2
    assert [(s.shape, s.dtype) for s in log.saved] == [((4,), "float32")]
