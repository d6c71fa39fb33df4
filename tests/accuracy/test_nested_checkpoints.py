"""Costs of a chain's schedule, against nested checkpoints of real PyTorch."""

from __future__ import annotations

import torch
from chain_machine import list_schedules, replay_schedule
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fxmem.planning.strategies.chain import (
    Chain,
    Kept,
    Schedule,
    Stage,
    StageOption,
)

STAGES = 4
COST = 100.0


class Stages:
    """Stages that count how often they run."""

    def __init__(self) -> None:
        self.weights = [torch.randn(8, 8, requires_grad=True) for _ in range(STAGES)]
        self.runs = 0

    def run_schedule(self, x: Tensor, schedule: Schedule) -> Tensor:
        for entry in schedule:
            if isinstance(entry, Kept):
                self.runs += 1
                x = torch.tanh(x @ self.weights[entry.stage]) + 1.0
            else:
                x = checkpoint(self.run_schedule, x, entry.body, use_reentrant=False)
        return x


def test_stages_run_as_often_as_the_cost_of_a_schedule_says() -> None:
    chain = Chain(tuple(Stage(1, 1, COST, (StageOption(1),)) for _ in range(STAGES)))
    for schedule in list_schedules(chain):
        stages = Stages()
        stages.run_schedule(torch.randn(4, 8, requires_grad=True), schedule).sum().backward()
        assert replay_schedule(chain, schedule)[1] == COST * (stages.runs - STAGES), schedule
