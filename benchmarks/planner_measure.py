"""Real steps of a model: peak, FLOPs, time, and the numbers computed."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cases import SEED
from benchmarks.step import default_loss, tensors_of
from fxmem.verifying.measuring import find_peak, watch_allocations

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Numbers:
    """The numbers that a step computed, and the statistics it left."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]

    def compare(self, other: Numbers) -> str:
        """Compares both to the bit: ``yes``, or the first difference."""
        if not torch.equal(self.loss, other.loss):
            return "loss differs"
        if not _are_equal(self.gradients, other.gradients):
            return "gradients differ"
        return "yes" if _are_equal(self.buffers, other.buffers) else "not statistics"


def _are_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    def equal(a: Tensor | None, b: Tensor | None) -> bool:
        return a is b if a is None or b is None else torch.equal(a, b)

    return ours.keys() == theirs.keys() and all(equal(ours[k], theirs[k]) for k in ours)


@dataclass(frozen=True)
class Measurement:
    """A step as it ran.

    Attributes:
        peak_bytes: Its peak, with what is resident.
        flops: As PyTorch counts them.
        time_ratio: Its time over that of the plain step, in turns; None where not timed.
        equal: Whether its numbers are those of the plain step.
    """

    peak_bytes: int
    flops: int
    time_ratio: float | None
    equal: str


class Trainer:
    """Takes steps of a model, from the same state and the same random numbers each time."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model = model.train()
        self.args, self.kwargs = args, kwargs
        self._state = copy.deepcopy(model.state_dict())

    @property
    def resident_bytes(self) -> int:
        """Parameters, buffers and inputs."""
        owned = [*self.model.parameters(), *self.model.buffers()]
        tensors = [*owned, *tensors_of([self.args, self.kwargs])]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    def reset(self) -> None:
        """Goes back to the state before the first step."""
        self.model.load_state_dict(self._state)
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(SEED)

    def run(self, forward: Forward) -> Tensor:
        """One step; the caller holds its output and loss to the end, as fxmem says."""
        self.model.zero_grad(set_to_none=True)
        output = forward(*self.args, **self.kwargs)
        loss = default_loss(output)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def compute_numbers(self, forward: Forward) -> Numbers:
        """The numbers of the first step."""
        self.reset()
        loss = self.run(forward)
        return Numbers(
            loss.clone(),
            {n: None if p.grad is None else p.grad.clone() for n, p in _named(self.model)},
            {name: buffer.clone() for name, buffer in self.model.named_buffers()},
        )

    def measure_peak(self, forward: Forward) -> int:
        """Bytes live at most in a step, by the allocator's events."""
        self.reset()
        with watch_allocations() as seen:
            with record_function("span step"):
                self.run(forward)
            self.reset()
        return self.resident_bytes + find_peak(seen["span step"])

    def count_flops(self, forward: Forward) -> int:
        """FLOPs of a step."""
        self.reset()
        count = getattr(forward, "count_flops", None)
        if count is not None:  # a compiled model's, which steps aside while others count
            return int(count(lambda: self.run(forward)))
        with FlopCounterMode(display=False) as counter:
            self.run(forward)
        return int(counter.get_total_flops())

    def time_step(self, forward: Forward) -> float:
        """Seconds of a step."""
        self.reset()
        start = time.perf_counter()
        self.run(forward)
        return time.perf_counter() - start

    def compare_time(self, forward: Forward, plain: Forward, rounds: int) -> float | None:
        """The time of a step over that of the plain one: the least of some rounds, in turns."""
        if not rounds:
            return None
        pairs = [(self.time_step(forward), self.time_step(plain)) for _ in range(rounds)]
        ours, theirs = zip(*pairs, strict=True)
        return min(ours) / min(theirs)

    def measure(
        self, forward: Forward, plain: Forward, numbers: Numbers, rounds: int = 2
    ) -> Measurement:
        """Everything about a step, whose first run warms up.

        Args:
            forward: What is called instead of the model.
            plain: The model without it, for the time.
            numbers: What the plain step computes.
            rounds: How often it is timed.
        """
        equal = self.compute_numbers(forward).compare(numbers)
        return Measurement(
            self.measure_peak(forward),
            self.count_flops(forward),
            self.compare_time(forward, plain, rounds),
            equal,
        )


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return model.named_parameters()
