"""Repetitions as Liger-Kernel's benchmarks measure them, for the sources whose names begin so.

``_test_memory`` in benchmark/scripts/utils.py calls a function ten times, resets the peak before
each call and reports the median: gradients are there from the call before and added to. The process
has run forward and backward before, so that each thread has its workspace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fxmem
from benchmarks.published.cases import Case
from benchmarks.published.predicting import list_peaks

CUDA = "cuda"
MODES = {
    "allocated": "full",
    "allocated in forward": "forward",
    "allocated in backward": "backward",
}


class Kernel(NamedTuple):
    """The measurement of a script.

    Attributes:
        forward: Gives what backward starts from.
        backward: Takes that; the script's own gradient is part of it.
        held: What else the script keeps on the GPU.
    """

    forward: Callable[[], Any]
    backward: Callable[[Any], None]
    held: tuple[Any, ...] = ()


Config = Mapping[str, Any]
Setup = Callable[[Config], Kernel]


class Repetition(nn.Module):
    """A call of what is measured; the first call makes what the script makes before.

    Args:
        setup: Makes the kernel's tensors.
        mode: ``full``, or ``forward`` or ``backward`` alone.
    """

    def __init__(self, setup: Callable[[], Kernel], mode: str) -> None:
        super().__init__()
        self._setup, self._mode = setup, mode
        self._run: Callable[[], Any] | None = None
        self._held: tuple[Any, ...] = ()

    def forward(self) -> None:
        """Runs it once."""
        with torch.enable_grad():
            if self._run is None:
                _run_full(*self._setup()[:2])
                self._run = self._prepare()
            self._run()

    def _prepare(self) -> Callable[[], Any]:
        forward, backward, self._held = self._setup()
        if self._mode == "forward":
            return forward
        if self._mode == "backward":
            output = forward()
            gradient = torch.randn_like(output)
            return lambda: output.backward(gradient, retain_graph=True)
        return lambda: _run_full(forward, backward)


def _run_full(forward: Callable[[], Any], backward: Callable[[Any], None]) -> None:
    output = forward()
    backward(output)


def predict_figures(case: Case, setups: Mapping[str, Setup]) -> dict[str, int]:
    """The figures of a case, by name.

    Args:
        case: Its ``config`` names the kernel.
        setups: By kernel.
    """
    setup = functools.partial(setups[case.config["kernel"]], case.config)
    figures = {}
    for figure in case.measured:
        analysis = fxmem.analyze(
            Repetition(setup, MODES[figure]),
            mode="infer",
            gpu=case.gpu,
            set_to_none=False,
            alloc_conf="",
            size_hint=case.config["batch"] // 2 if case.config["kernel"] == "kto_loss" else None,
        )
        figures[figure] = list_peaks(analysis)["allocated"]
    return figures


def find_dtype(config: Config) -> torch.dtype:
    """The dtype that a configuration names; float32 where it names none."""
    dtype: torch.dtype = getattr(torch, config.get("dtype", "float32"))
    return dtype


def make_input(config: Config, *shape: int, requires_grad: bool = True) -> Tensor:
    """Random numbers on the GPU, in the dtype of a configuration.

    Args:
        config: Has the shape too, where none is given.
        shape: That of the tensor.
        requires_grad: Whether gradients are computed for it.
    """
    return torch.randn(
        shape or config["shape"],
        dtype=find_dtype(config),
        device=CUDA,
        requires_grad=requires_grad,
    )


def start_from_random(output: Tensor) -> None:
    """Backward from a random gradient that is made for it; the graph stays."""
    output.backward(torch.randn_like(output), retain_graph=True)


def start_from(gradient: Tensor) -> Callable[[Tensor], None]:
    """Backward from a gradient that is there already; the graph stays."""
    return lambda output: output.backward(gradient, retain_graph=True)
