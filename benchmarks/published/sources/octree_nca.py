"""Neural cellular automata over images and volumes: a small network, applied again and again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fxmem
from benchmarks.published.cases import Case
from fxmem.kernels.cuda.linear import cublas_workspace_bytes
from fxmem.memory.allocation import list_events, replay

CHANNELS, HIDDEN = 16, 64


class Automaton2d(nn.Module):
    """Convolutions without normalisation; three channels are input."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.fc0 = nn.Conv2d(CHANNELS * 2, HIDDEN, 1)
        self.fc1 = nn.Conv2d(HIDDEN, CHANNELS - 3, 1, bias=False)
        self.conv = nn.Conv2d(
            CHANNELS, CHANNELS, 3, padding=1, padding_mode="reflect", groups=CHANNELS
        )

    def update(self, state: Tensor) -> Tensor:
        """The channels that are no input, one step on."""
        delta = self.conv(state)
        delta = torch.cat([state, delta], dim=1)
        delta = self.fc0(delta)
        delta = functional.relu(delta)
        delta = self.fc1(delta)
        fires = torch.zeros([*delta.shape[:3], 1], device=delta.device).bernoulli_(0.5)
        delta = delta * fires
        return state[:, 3:] + delta

    def forward(self, x: Tensor) -> Tensor:
        """From a state (batch, height, width, channels) to one of that shape."""
        state = x.permute(0, 3, 1, 2)
        inputs = state[:, :3]
        for _ in range(self.steps):
            new_state = self.update(state)
            state = torch.cat([inputs, new_state], dim=1)
        return state.permute(0, 2, 3, 1)


class Automaton3d(nn.Module):
    """A convolution, linear layers and BatchNorm of the batch at hand; one channel is input."""

    def __init__(self, steps: int, kernel: int, inplace: bool, trains: bool) -> None:
        super().__init__()
        self.steps, self.inplace, self.trains = steps, inplace, trains
        self.fc0 = nn.Linear(CHANNELS * 2, HIDDEN)
        self.fc1 = nn.Linear(HIDDEN, CHANNELS, bias=False)
        self.p0 = nn.Conv3d(
            CHANNELS,
            CHANNELS,
            kernel,
            padding=(kernel - 1) // 2,
            padding_mode="reflect",
            groups=CHANNELS,
        )
        self.bn = nn.BatchNorm3d(HIDDEN, track_running_stats=False)

    def perceive(self, x: Tensor) -> Tensor:
        """A state beside its convolution."""
        convolved = self.p0(x)
        return torch.cat((x, convolved), 1)

    def update(self, state: Tensor) -> Tensor:
        """The state, one step on."""
        x = state.transpose(1, 4)
        dx = self.perceive(x)
        dx = dx.transpose(1, 4)
        dx = self.fc0(dx)
        dx = dx.transpose(1, 4)
        dx = self.bn(dx)
        dx = dx.transpose(1, 4)
        dx = functional.relu(dx, inplace=self.inplace)
        dx = self.fc1(dx)
        fires = dx.new_empty([*dx.shape[:4], 1])  # drawn on the CPU
        dx = dx * fires
        x = x + dx.transpose(1, 4)
        return x.transpose(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        """From a state (batch, height, width, depth, channels) to one of that shape."""
        with torch.set_grad_enabled(self.trains):
            for _ in range(self.steps):
                new_state = self.update(x).clone()
                x = torch.concat((x[..., :1], new_state[..., 1:]), 4)
        return x


def build(config: Any) -> nn.Module:
    """The network of a case."""
    if config["model"] == "2d":
        return Automaton2d(config["steps"])
    return Automaton3d(
        config["steps"], config.get("kernel", 3), config.get("inplace", False), config["train"]
    )


def predict(case: Case) -> dict[str, int]:
    """Predicts the requests of a forward above those before it, at most and in the end."""
    config = case.config
    shape = config["batch"], *config["sizes"], CHANNELS
    with torch.device("meta"):
        network = build(config)
    analysis = fxmem.analyze(
        network,
        (fxmem.TensorSpec(shape, "float32"),),
        mode="infer",
        gpu=case.gpu,
        alloc_conf="",
    )
    assert analysis.settings is not None
    events, begin = list_events(analysis.graph)
    before, *requested = replay(events, analysis.settings).requested_bytes[begin - 1 :]
    first = cublas_workspace_bytes() if config.get("first") else 0
    return {
        "requested by forward": max(requested) - before + first,
        "requested kept by forward": requested[-1] - before,
    }
