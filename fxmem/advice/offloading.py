"""FX303: activations kept in the host's memory between forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fxmem.advice.editing import CAST, FORWARD, StepEdit
from fxmem.analysis import Analysis
from fxmem.finding import Finding
from fxmem.graph import Category, Operation, Phase, Save, Storage
from fxmem.units import format_bytes

_LEAST_BYTES = 1 << 20


def find_offloads(analysis: Analysis) -> Iterator[Finding]:
    """Simulates moving large activations to the host while backward does not need them.

    An activation is away from the last operator of forward that uses it to the first of the
    backward that takes it out; each function that saved it gets a copy of its own, as with
    ``torch.autograd.graph.saved_tensors_hooks``.
    """
    if analysis.setup.device != "cuda":  # the host's own memory is what is short
        return
    edit = StepEdit(analysis)
    saves: dict[int, list[Save]] = {}
    for save in edit.graph.saves:
        saves.setdefault(save.storage, []).append(save)
    away, traffic_bytes = list[Storage](), 0
    for storage in analysis.peak.live:
        kept, used = saves.get(storage.index, []), edit.readers.get(storage.index, ())
        if storage.nbytes < _LEAST_BYTES or not _can_offload(edit, storage, kept, used):
            continue
        forward = (operation.index for operation in used if operation.phase in FORWARD)
        gone_after = max(storage.born, *forward, *(save.position - 1 for save in kept))
        edit.change(storage.index, died=gone_after)
        for save in kept:
            if save.unpacked is not None and save.returned is not None:
                edit.add(storage.nbytes, save.unpacked, save.returned)
        away.append(storage)
        traffic_bytes += len(kept) * (storage.nbytes - storage.slack_bytes)
    if away:
        count = f"{len(away)} activations" if len(away) > 1 else "the activation"
        yield edit.make_finding(
            code="FX303",
            change=f"Keep {count} of {format_bytes(_LEAST_BYTES)} and more in the host's memory "
            "until backward needs them",
            option="with torch.autograd.graph.saved_tensors_hooks(pack, unpack): pack moves a "
            "large tensor to the host, unpack back",
            cost=f"{format_bytes(traffic_bytes)} to the host in forward, and back in backward, in "
            "each step.",
            source=edit.nodes[away[0].saved_by[0]].source,
        )


def _can_offload(
    edit: StepEdit, storage: Storage, saves: Iterable[Save], uses: Iterable[Operation]
) -> bool:
    """Returns whether autograd alone holds an activation of forward in backward."""
    maker = edit.find_maker(storage)
    if storage.category is not Category.ACTIVATION or storage.died is None or maker is None:
        return False
    read = {edit.graph.storages[index].category for index in maker.reads}
    # Autocast keeps the result itself where it casts a parameter.
    is_cast = maker.name == CAST and read == {Category.PARAMETER}
    if maker.phase is not Phase.FORWARD or is_cast or not storage.saved_by:  # nothing to name
        return False
    windows = [(save.unpacked, save.released) for save in saves]
    spans = [(first, last) for first, last in windows if first is not None and last is not None]
    backward = [operation.index for operation in uses if operation.phase not in FORWARD]
    return (
        0 < len(spans) == len(windows)
        and storage.died <= max(last for _, last in spans)
        and all(any(first <= at <= last for first, last in spans) for at in backward)
    )
