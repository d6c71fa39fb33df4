"""The canonical training or inference step, in plain PyTorch, phase by phase."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from benchmarks.cases import SEED, Case

Mode = Literal["train", "train+adam", "infer"]
MODES: tuple[Mode, ...] = ("train", "train+adam", "infer")


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in an output, in order: containers, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):  # a transformers ModelOutput is one, and a dataclass too
        for item in value.values():
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from tensors_of(getattr(value, item.name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)


def default_loss(output: Any) -> torch.Tensor:
    """Returns the output's own loss, else the sum of its floating-point tensors.

    Only tensors that require grad count, each distinct tensor once; the sums are added from
    left to right.
    """
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    total: torch.Tensor | None = None
    seen: set[int] = set()
    for tensor in tensors_of(output):
        if id(tensor) in seen or not (tensor.is_floating_point() and tensor.requires_grad):
            continue
        seen.add(id(tensor))
        total = tensor.sum() if total is None else total + tensor.sum()
    if total is None:
        raise ValueError("no output requires grad")
    return total


class Step:
    """A model, its inputs and its optimizer; `run` takes one step and keeps what a caller keeps."""

    def __init__(self, case: Case, mode: Mode) -> None:
        self.mode = mode
        self.model: nn.Module = case.model().train(mode != "infer")
        self.args, self.kwargs = case.inputs()
        self.optimizer = (
            torch.optim.Adam(self.model.parameters(), lr=1e-4) if mode == "train+adam" else None
        )
        self.output: Any = None
        self.loss: torch.Tensor | None = None

    def run(
        self,
        forward: AbstractContextManager[Any] | None = None,
        backward: AbstractContextManager[Any] | None = None,
    ) -> None:
        """Takes one step; `forward` is entered around the forward and the loss."""
        self.run_forward(forward)
        if self.loss is not None:
            with backward or nullcontext():
                self.loss.backward()
            if self.optimizer is not None:
                self.optimizer.step()

    def run_forward(self, around: AbstractContextManager[Any] | None = None) -> None:
        """Runs a step up to its loss."""
        torch.manual_seed(SEED)
        self.zero_grad()
        training = self.mode != "infer"
        with around or nullcontext(), torch.set_grad_enabled(training):
            self.output = self.model(*self.args, **self.kwargs)
            if training:
                self.loss = default_loss(self.output)

    def zero_grad(self) -> None:
        """Drops the parameters' gradients, by the optimizer if there is one."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            self.model.zero_grad(set_to_none=True)

    def release(self) -> None:
        """Drops what the caller held of the last step, and collects cycles."""
        self.output = self.loss = None
        self.zero_grad()
        for tensor in self.inputs():
            tensor.grad = None
        gc.collect()

    def inputs(self) -> list[torch.Tensor]:
        """Returns the input tensors."""
        return list(tensors_of([self.args, self.kwargs]))

    def resident(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (kind, tensor) of what the model and the caller own before any step."""
        for parameter in self.model.parameters():
            yield "parameter", parameter
        for buffer in self.model.buffers():
            yield "buffer", buffer
        for tensor in self.inputs():
            yield "input", tensor
        for module in self.model.modules():  # tensors that were never registered
            for value in vars(module).values():
                if isinstance(value, torch.Tensor):
                    yield "constant", value
