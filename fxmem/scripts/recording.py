"""Recording of the steps of any code, in a ``with`` statement."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fxmem.analysis import Analysis
from fxmem.graph import SourceLocation
from fxmem.memory.liveness import Peak
from fxmem.recording.size_hints import SizeHint
from fxmem.scripts.generation import limit_generation
from fxmem.scripts.launchers import Launcher
from fxmem.scripts.script_run import Read, ScriptRun
from fxmem.scripts.session import Session
from fxmem.scripts.windows import EnoughSteps, Windows
from fxmem.source import find_source
from fxmem.training.options import resolve_compilation, resolve_device


@dataclass(frozen=True, slots=True)
class NamedPhase:
    """A part of the code that was given a name.

    Attributes:
        name: The name.
        step: Index in :attr:`Recording.steps` of the step in which it took the most; None for
            what ran apart from them, such as ``Recording.run.loading``.
        peak_bytes: The most bytes that were allocated meanwhile, all else included.
        source: The line that ran then; None outside of the user's code.
    """

    name: str
    step: int | None
    peak_bytes: int
    source: SourceLocation | None


class Recording:
    """The steps of a block of code, complete when the block is left."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._places: list[tuple[str, tuple[int, int], tuple[int, int]]] = []

    @property
    def steps(self) -> tuple[Analysis, ...]:
        """The analysis of each step, in order; what ran after the last one comes last.

        Of code without a step, what ran.
        """
        windows = self._session.windows
        return tuple(windows.steps or windows.recorded)

    @property
    def run(self) -> ScriptRun:
        """The steps as those of a script, to be shown or written.

        Raises:
            TraceError: Nothing was recorded.
        """
        return self._session.describe()

    @property
    def peak(self) -> Peak:
        """The peak of the largest step."""
        return self.run.largest.peak

    @property
    def reads(self) -> tuple[Read, ...]:
        """The lines that read values of tensors, and got stand-ins."""
        return self.run.reads

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on how the code was run, a sentence each."""
        return self.run.notes

    @property
    def phases(self) -> tuple[NamedPhase, ...]:
        """The parts that were named and ran an operator, in the order in which they ended."""
        found = (self._measure(*place) for place in self._places)
        return tuple(phase for phase in found if phase is not None)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names a part of the code, whose peak :attr:`phases` has."""
        start = self._session.read_place()
        try:
            yield
        finally:
            self._places.append((name, start, self._session.read_place()))

    def _measure(
        self, name: str, start: tuple[int, int], stop: tuple[int, int]
    ) -> NamedPhase | None:
        windows = self._session.windows.ended
        most: tuple[int, int, int] | None = None
        for window in range(start[0], min(stop[0] + 1, len(windows))):
            live_bytes = windows[window].profile.live_bytes
            first = start[1] if window == start[0] else 0
            last = stop[1] if window == stop[0] else len(live_bytes)
            for operation in range(first, min(last, len(live_bytes))):
                if most is None or live_bytes[operation] > most[0]:
                    most = live_bytes[operation], window, operation
        if most is None:
            return None
        graph = windows[most[1]].graph
        node = graph.operations[most[2]].node
        step = next((at for at, each in enumerate(self.steps) if each.graph is graph), None)
        source = None if node is None else graph.nodes[node].source
        return NamedPhase(name, step, most[0], source)

    def __str__(self) -> str:
        return str(self.run)

    def _repr_html_(self) -> Any:
        return self.run._repr_html_()


@contextlib.contextmanager
def record(
    *,
    steps: int | None = None,
    device: str = "cuda",
    gpu: str | None = None,
    reserve: str | int | None = None,
    attention: str | None = None,
    alloc_conf: str | None = None,
    size_hint: SizeHint = None,
    routing: str | Sequence[float] = "balanced",
    new_tokens: int | None = None,
    compile: bool = True,
    activation_memory_budget: float | None = None,
    world_size: int | None = None,
    rank: int = 0,
) -> Iterator[Recording]:
    """Records the steps of the code in a ``with`` statement, on fake tensors.

    The code is as for a GPU: it makes or moves models and data to ``"cuda"``. A step ends when all
    optimizers have stepped. When another begins after the last one asked for, the block is left,
    and the program goes on after it. Modules that were moved within get their own tensors back;
    other tensors that were made within have no values.

    Args:
        steps: As for :func:`fxmem.run`, like the other arguments.
        device: ``"cuda"``, or ``"cpu"`` for code that trains there.
        gpu: The target GPU.
        reserve: Memory of it that is kept for others.
        attention: The backend of attention that is assumed.
        alloc_conf: As ``PYTORCH_ALLOC_CONF``.
        size_hint: How many elements ``nonzero``, boolean masks and the like find; None for all.
        routing: The experts that tokens are sent to: as for :func:`fxmem.analyze`.
        new_tokens: After how many tokens transformers' ``generate`` ends a text; None for as many
            as the code allows.
        compile: Whether ``torch.compile`` compiles; False for eager figures.
        activation_memory_budget: As for :func:`fxmem.analyze`.
        world_size: The number of processes, of which this is one.
        rank: Its rank.

    Raises:
        UsageError: An argument is not understood.

    >>> import torch
    >>> model = torch.nn.Linear(1024, 1024)
    >>> with record(gpu="h100", steps=1) as recording:
    ...     loss = model.cuda()(torch.ones(256, 1024, device="cuda")).sum()
    ...     with recording.phase("backward"):
    ...         loss.backward()
    >>> recording.peak.phase.value, [phase.name for phase in recording.phases]
    ('backward', ['backward'])
    >>> model.weight.device.type
    'cpu'
    """
    options = resolve_device(device, gpu, attention, alloc_conf, size_hint, reserve, routing)
    chosen = resolve_compilation(None if compile else False, activation_memory_budget)
    options = replace(options, compilation=chosen)
    launcher = Launcher(rank, world_size)
    launcher.script = str(find_source() or "the code")
    session = Session(options, Windows(steps), launcher, keeps_real=True)
    recording = Recording(session)
    with session.watch(), launcher.take_place(), limit_generation(new_tokens):
        with contextlib.suppress(EnoughSteps):
            yield recording
        session.end()
