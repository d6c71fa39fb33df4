"""From an analysis to the figures that people measure."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Collection, Iterator, Mapping
from unittest import mock

from benchmarks.cases import import_torchvision
from benchmarks.published.cases import Case
from fxmem.analysis import Analysis
from fxmem.gpus import find_gpu
from fxmem.graph import Phase
from fxmem.kernels.cuda.gpu import describe_gpu
from fxmem.memory.allocation import list_events, replay
from fxmem.training import options

ALL_PHASES = tuple(Phase)
AT_MOST = " at most"


def predict(case: Case) -> dict[str, int]:
    """The figures of a case, by name.

    A figure's name with ``AT_MOST`` behind it is the upper end of the range that fxmem states where
    a library chooses.
    """
    import_torchvision()
    module = importlib.import_module(f"benchmarks.published.sources.{case.source}")
    figures: Mapping[str, int] = module.predict(case)
    missing = set(case.measured) - set(figures)
    if missing:
        raise ValueError(f"{case}: no prediction of {', '.join(sorted(missing))}")
    names = [name + end for name in case.measured for end in ("", AT_MOST)]
    return {name: figures[name] for name in names if name in figures}


@contextlib.contextmanager
def use_cudnn(version: int) -> Iterator[None]:
    """Predicts for a GPU with this version of cuDNN, which decides backends of attention.

    Args:
        version: As ``torch.backends.cudnn.version()`` gives it, e.g. 90100.
    """

    def describe(model: object) -> object:
        return dataclasses.replace(describe_gpu(model), cudnn_version=version)  # type: ignore[arg-type]

    with mock.patch.object(options, "describe_gpu", describe):
        yield


def find_capability(case: Case) -> tuple[int, int]:
    """The compute capability of a case's GPU; an A100's where it is not named."""
    return find_gpu(case.gpu).capability if case.gpu else (8, 0)


def list_peaks(analysis: Analysis, *, first: bool = False) -> dict[str, int]:
    """Peaks of a step: ``allocated``, ``requested`` and ``reserved``.

    Of the second step, ``allocated at most`` too: with all that cuDNN may choose to take.

    Args:
        analysis: Of the step.
        first: Whether those of the first step, from the model's move to the GPU on, are meant;
            else those of the second, as ``reset_peak_memory_stats()`` before it gives them.
    """
    assert analysis.settings is not None
    events, begin = list_events(analysis.graph)
    profile = replay(events, analysis.settings)
    window = slice(0, begin) if first else slice(max(begin - 1, 0), None)
    peaks = {
        "allocated": max(profile.allocated_bytes[window]),
        "requested": max(profile.requested_bytes[window]),
        "reserved": max(profile.reserved_bytes[window]),
    }
    return peaks if first else peaks | {f"allocated{AT_MOST}": analysis.library_peak_bytes}


def find_peak_in(analysis: Analysis, phases: Collection[Phase]) -> int:
    """The most allocated during these phases of the second step.

    What ``max_memory_allocated()`` gives when the peak is reset before the first of them.
    """
    operations = zip(analysis.profile.live_bytes, analysis.graph.operations, strict=True)
    return max(live for live, operation in operations if operation.phase in phases)


def find_allocated_after(analysis: Analysis, phases: Collection[Phase] = ALL_PHASES) -> int:
    """Predicts ``memory_allocated()`` after the last of these phases of the second step.

    Without phases, before its forward.
    """
    timeline = analysis.timeline
    live = timeline.live_bytes()
    at = [index for index, event in enumerate(timeline.events) if event.phase in phases]
    return live[at[-1]] if at else timeline.resident_bytes
