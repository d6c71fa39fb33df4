"""What a reader should know about how a step was recorded, a sentence each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fxmem.graph import Category, MemoryGraph
from fxmem.kernels.registry import Target
from fxmem.recording.step import Recording
from fxmem.units import format_bytes


def note_devices(named: Iterable[str], target: str) -> Iterator[str]:
    """That the code names other devices than the target.

    >>> [*note_devices({"cuda:1", "cpu"}, "cpu")]
    ['The code names devices (cuda:1): taken as the target, cpu.']
    """
    others = sorted(name for name in named if not name.startswith(target))
    if others:
        yield f"The code names devices ({', '.join(others)}): taken as the target, {target}."


def note_unused(mode: str, loss: object, optimizer: object) -> Iterator[str]:
    """That inference runs neither the loss nor the optimizer that were given.

    >>> [*note_unused("infer", "mse", "adam")]
    ['Inference leaves out the loss and the optimizer.']
    """
    unused = [
        name
        for name, choice in (("loss", loss), ("optimizer", optimizer))
        if mode == "infer" and choice is not None
    ]
    if unused:
        yield f"Inference leaves out the {' and the '.join(unused)}."


def note_other_inference(inference_mode: bool, peak_bytes: int) -> str:
    """The peak under ``no_grad`` of what was analysed under ``inference_mode``, or the reverse.

    Args:
        inference_mode: Whether it was.
        peak_bytes: The other peak.

    >>> note_other_inference(True, 2 << 20)
    'Under torch.no_grad() the peak is 2.00 MiB: autocast keeps its casts of weights there.'
    """
    peak = format_bytes(peak_bytes)
    if inference_mode:
        return (
            f"Under torch.no_grad() the peak is {peak}: autocast keeps its casts of weights there."
        )
    return (
        f"Under torch.inference_mode() (inference_mode=True, --inference-mode) the peak is {peak}:"
        " autocast keeps no casts of weights there."
    )


def note_recording(recording: Recording, target: Target) -> Iterator[str]:
    """What the recording itself tells."""
    yield from _note_held(recording.graph)
    yield from recording.notes
    yield from _note_unmodelled(recording.graph, target)


def _note_held(graph: MemoryGraph) -> Iterator[str]:
    """What the results of the step before take."""
    held = [s for s in graph.storages if s.category is Category.OUTPUT and s.born < 0]
    if held:
        nbytes = format_bytes(sum(storage.nbytes for storage in held))
        yield f"Results of the step before take {nbytes} until those of this one are there."


def _note_unmodelled(graph: MemoryGraph, target: Target) -> Iterator[str]:
    """Which operators hold memory that nothing states, and why; each once."""
    known = {str(operator): reason for operator, reason in target.unmodelled.items()}
    for name in dict.fromkeys(o.name for o in graph.operations if o.name in known):
        yield f"What {name} holds inside itself is not counted: {known[name]}."
