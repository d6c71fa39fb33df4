from __future__ import annotations

import torch
from torch import nn

import fxmem
from fxmem.graph import FirstOperation, Operation, Phase
from fxmem.recording.first_step import FirstStepLog

aten = torch.ops.aten


def test_operators_that_allocate_nothing_are_left_out() -> None:
    log = FirstStepLog()
    log.see(aten.t.default, Phase.FORWARD, 3)
    log.see(aten.mm.default, Phase.FORWARD, 3)
    log.see(aten.sum.default, Phase.LOSS, 4)
    log.see(aten.zeros_like.default, Phase.OPTIMIZER, 5)
    log.see(aten.sqrt.default, Phase.OPTIMIZER, 6)
    operations = (
        Operation(0, "step.begin", Phase.FORWARD),
        Operation(1, "aten.t.default", Phase.FORWARD),
        Operation(2, "random.get_state", Phase.FORWARD),
        Operation(3, "aten.mm.default", Phase.FORWARD),
        Operation(4, "aten.mean.default", Phase.LOSS),
        Operation(5, "aten.zeros_like.default", Phase.OPTIMIZER),
    )
    assert [*log.list_operations(operations)] == [
        FirstOperation(3, Phase.FORWARD, 3),
        FirstOperation(4, Phase.LOSS, None),
        FirstOperation(5, Phase.OPTIMIZER, None),
    ]


def test_the_lines_of_the_first_step_are_those_of_the_second() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.ReLU(), nn.Linear(16, 4))
    graph = fxmem.analyze(model, ("4x8",), optimizer="adam", device="cuda").graph
    *twins, of_optimizer = graph.first_operations
    assert of_optimizer.phase is Phase.OPTIMIZER
    assert len(twins) > 10
    for first in twins:
        assert first.twin is not None
        assert graph.operations[first.twin].phase is first.phase
