"""Functions of autograd belong to the node during which they were numbered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fxmem.recording.sequences import SequenceLog


@pytest.fixture
def leaf() -> Tensor:
    return torch.zeros(4, requires_grad=True)


def run_nodes(log: SequenceLog, x: Tensor) -> Iterator[Tensor]:
    """Two nodes, one without functions between them, and a function outside of all."""
    log.enter_node()
    y = x.exp()
    log.exit_node(0)
    log.enter_node()
    log.exit_node(1)
    log.enter_node()
    z = y.sin().cos()
    log.exit_node(2)
    return iter((y, z, z.sum()))


def test_a_function_belongs_to_the_node_that_made_it(leaf: Tensor) -> None:
    log = SequenceLog()
    of_first, of_third, outside = (t.grad_fn for t in run_nodes(log, leaf))
    assert log.find_node(of_first) == 0
    assert log.find_node(of_third) == log.find_node(of_third.next_functions[0][0]) == 2
    assert log.find_node(outside) is None


def test_what_has_no_number_belongs_to_none(leaf: Tensor) -> None:
    log = SequenceLog()
    first, *_ = run_nodes(log, leaf)
    accumulates = first.grad_fn.next_functions[0][0]
    assert accumulates.name() == "torch::autograd::AccumulateGrad"
    assert log.find_node(accumulates) is None


def test_a_function_runs_from_its_first_operation_to_its_last(leaf: Tensor) -> None:
    log = SequenceLog()
    function = leaf.exp().grad_fn
    for operation in (5, 6, 9):
        log.see_operation(function, operation)
    assert log.ran == {function._sequence_nr(): (5, 9)}
