"""What a chain's schedule costs, against nested checkpoints of real PyTorch."""

from __future__ import annotations

import torch
from chain_machine import list_schedules
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fxmem.planning.strategies.chains.chain import (
    Chain,
    Kept,
    Schedule,
    Stage,
    StageOption,
    measure_schedule,
)

STAGES = 4
STAGE_COST = 100.0
TAIL_COST = 1.0


class Stages:
    """Stages that count how often they run, and how often to the end."""

    def __init__(self) -> None:
        self.weights = [torch.randn(8, 8, requires_grad=True) for _ in range(STAGES)]
        self.starts = self.ends = 0

    def run_stage(self, stage: int, x: Tensor) -> Tensor:
        """Saves its input and its tanh; the addition at its end saves nothing."""
        self.starts += 1
        y = torch.tanh(x @ self.weights[stage])
        self.ends += 1
        return y + 1.0

    def run_schedule(self, x: Tensor, schedule: Schedule) -> Tensor:
        for entry in schedule:
            if isinstance(entry, Kept):
                x = self.run_stage(entry.stage, x)
            else:
                x = checkpoint(self.run_schedule, x, entry.body, use_reentrant=False)
        return x


def test_stages_run_as_often_as_the_cost_of_a_schedule_says() -> None:
    option = StageOption(1, tail_cost=TAIL_COST)
    chain = Chain(tuple(Stage(1, 1, STAGE_COST, (option,)) for _ in range(STAGES)))
    for schedule in list_schedules(chain):
        stages = Stages()
        stages.run_schedule(torch.randn(4, 8, requires_grad=True), schedule).sum().backward()
        again = STAGE_COST * (stages.starts - STAGES) - TAIL_COST * (stages.starts - stages.ends)
        assert measure_schedule(chain, schedule).cost == again, schedule
