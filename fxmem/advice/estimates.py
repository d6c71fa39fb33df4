"""Advice that is computed on the recorded step, without running it anew."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fxmem.advice.record import Advice
from fxmem.analysis import Analysis
from fxmem.graph import Category, MemoryGraph, Operation, Phase, Save, Storage
from fxmem.memory.timeline import build_timeline
from fxmem.units import format_bytes

_MOST_TRIED = 16
_MOST_TOLD = 3
_LOSS_CHUNKS = 4
_LEAST_LOSS_SHARE = 0.05
_FORWARD = (Phase.FORWARD, Phase.LOSS)


def estimate_offloads(analysis: Analysis) -> tuple[Advice, ...]:
    """Estimates moving single activations to the host while backward does not need them.

    An activation is away from the last operator of forward that uses it to the first of the
    backward that takes it out; each function that saved it gets a copy of its own, as with
    ``torch.autograd.graph.saved_tensors_hooks``. At most three are listed, most saved first.
    """
    if analysis.setup.device != "cuda":  # the host's own memory is what is short
        return ()
    graph = analysis.allocated_graph
    saves: dict[int, list[Save]] = {}
    for save in graph.saves:
        saves.setdefault(save.storage, []).append(save)
    uses: dict[int, list[Operation]] = {}
    for operation in graph.operations:
        for index in {*operation.reads, *operation.writes}:
            uses.setdefault(index, []).append(operation)
    found = []
    candidates = [storage for storage in analysis.peak.live if storage.index in saves]
    for storage in candidates[:_MOST_TRIED]:
        kept, used = saves[storage.index], uses.get(storage.index, [])
        if not _can_offload(graph, storage, kept, used):
            continue
        gone_after = max(
            storage.born,
            *(operation.index for operation in used if operation.phase in _FORWARD),
            *(save.position - 1 for save in kept),
        )
        storages = [*graph.storages]
        storages[storage.index] = replace(storage, died=gone_after)
        for save in kept:
            if save.unpacked is not None:
                copy = replace(storage, born=save.unpacked, died=save.released)
                storages.append(replace(copy, index=len(storages)))
        found.append(_describe_offload(analysis, storage, len(kept), _find_peak(graph, storages)))
    return tuple(sorted(found, key=lambda advice: advice.peak_bytes)[:_MOST_TOLD])


def _can_offload(
    graph: MemoryGraph, storage: Storage, saves: Iterable[Save], uses: Iterable[Operation]
) -> bool:
    """Tells whether it is an activation of forward that autograd alone holds in backward."""
    if storage.category is not Category.ACTIVATION or storage.born < 0 or storage.died is None:
        return False
    born = graph.operations[storage.born]
    read = {graph.storages[index].category for index in born.reads}
    # Autocast keeps the result itself where it casts a parameter.
    is_cast = born.name == "aten._to_copy.default" and read == {Category.PARAMETER}
    if born.phase is not Phase.FORWARD or is_cast or not storage.saved_by:  # nothing to name
        return False
    windows = [(save.unpacked, save.released) for save in saves]
    spans = [(first, last) for first, last in windows if first is not None and last is not None]
    backward = [operation.index for operation in uses if operation.phase not in _FORWARD]
    return (
        len(spans) == len(windows)
        and storage.died <= max(last for _, last in spans)
        and all(any(first <= at <= last for first, last in spans) for at in backward)
    )


def _describe_offload(analysis: Analysis, storage: Storage, saves: int, peak_bytes: int) -> Advice:
    nodes = [analysis.nodes[index].name for index in storage.saved_by]
    source = analysis.nodes[storage.saved_by[0]].source
    shape = "x".join(map(str, storage.shape)) or "scalar"
    traffic = format_bytes(saves * (storage.nbytes - storage.slack_bytes))
    return Advice(
        change=f"Keep in the host's memory the {shape}:{storage.dtype} that "
        f"{' and '.join(nodes)} {'save' if len(nodes) > 1 else 'saves'}"
        + (f" ({source})" if source else ""),
        option="with torch.autograd.graph.saved_tensors_hooks(pack, unpack): pack moves it to the "
        "host, unpack back",
        peak_bytes=peak_bytes,
        saving_bytes=analysis.peak_bytes - peak_bytes,
        cost=f"{traffic} to the host in forward, and back in backward, in each step. An estimate: "
        "less is saved where a variable holds it for longer.",
    )


def estimate_loss_chunks(analysis: Analysis) -> tuple[Advice, ...]:
    """Estimates computing the loss in four parts of the batch, one after another.

    Of what the loss makes (float32 copies of half logits, a log-softmax), a quarter is there at
    a time.
    """
    graph = analysis.allocated_graph
    storages = [*graph.storages]
    alive = {storage.index for storage in analysis.peak.live}
    at_peak = 0
    for storage in graph.storages:
        is_temporary = storage.born >= 0 and storage.died is not None
        if is_temporary and graph.operations[storage.born].phase is Phase.LOSS:
            at_peak += storage.nbytes if storage.index in alive else 0
            storages[storage.index] = replace(storage, nbytes=-(-storage.nbytes // _LOSS_CHUNKS))
    if at_peak <= _LEAST_LOSS_SHARE * analysis.peak_bytes:
        return ()
    peak_bytes = _find_peak(graph, storages)
    left = format_bytes(-(-at_peak // _LOSS_CHUNKS))
    advice = Advice(
        change=f"Compute the loss in {_LOSS_CHUNKS} parts of the batch: of the "
        f"{format_bytes(at_peak)} that it holds at the peak, {left} are left",
        option="torch.utils.checkpoint.checkpoint(loss, part, use_reentrant=False), summed over "
        f"the parts of output.chunk({_LOSS_CHUNKS})",
        peak_bytes=peak_bytes,
        saving_bytes=analysis.peak_bytes - peak_bytes,
        cost="The loss is computed twice, and a mean has to be weighted by the sizes of the "
        "parts. An estimate.",
    )
    return (advice,)


def _find_peak(graph: MemoryGraph, storages: Iterable[Storage]) -> int:
    return max(build_timeline(replace(graph, storages=tuple(storages))).profile())
