"""Setup of an analysed step and its training loop, as a report names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Loop:
    """A training loop by name, with the settings that differ from its own.

    Attributes:
        name: Name of its function: one of :data:`fxmem.training.loops.LOOPS`, or the caller's.
        settings: Keyword arguments of the function.

    >>> str(Loop("huggingface", {"accumulate": 4}))
    'huggingface(accumulate=4)'
    """

    name: str = "plain"
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def accumulate(self) -> int:
        """The number of micro-batches that add up their gradients before the optimizer steps."""
        return int(self.settings.get("accumulate", 1))

    @property
    def set_to_none(self) -> bool:
        """True if ``zero_grad`` frees gradients; else they are zeroed in place."""
        return bool(self.settings.get("set_to_none", True))

    @property
    def retain_graph(self) -> bool:
        """True if backward keeps the graph, which lives as long as the loss and the output."""
        return bool(self.settings.get("retain_graph", False))

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"{self.name}({settings})" if settings else self.name


PLAIN = Loop()


@dataclass(frozen=True, slots=True)
class Setup:
    """The analysed step, as text."""

    model: str  # the TARGET, or the class of the module that was given
    inputs: tuple[str, ...]  # a spec for each: "8x3x224x224:float32"
    mode: str  # "train", "infer" or "generate"
    device: str
    optimizer: str | None
    loss: str | None  # None for the default
    frontend: str  # "fx" or "record": the tracer that served
    gpu: str | None = None
    autocast: str | None = None  # the dtype that forward and loss are autocast to
    frontend_reason: str = ""  # why fx did not serve
    notes: tuple[str, ...] = ()  # on how the analysis was done, a sentence each
    # the size assumed where sizes depend on data, or sizes by line
    size_hint: int | Mapping[str, int] | None = None
    inference_mode: bool = False  # else inference is under no_grad
    window: str = ""  # of recorded code: "step 1", "after step 2"; else empty
    loop: Loop = PLAIN
    # names and sizes of the mesh of processes, one of whose ranks the step is of; None for one
    mesh: Mapping[str, int] | None = None
    parallelize: str | None = None  # how the model is laid out on the mesh
    rank: int | str = 0
    # what came of the code's torch.compile: "compiled", or "left out"; None where none is called
    compile: str | None = None
    attention: str | None = None  # the backend tried first, where one was asked for
    schedule: str | None = None  # of the pipeline, one of whose ranks the step is of
