"""FX106: a checkpoint around so much that computing it again takes what it was to save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise

from fxmem.advice.editing import StepEdit
from fxmem.analysis import Analysis
from fxmem.finding import Finding
from fxmem.graph import Operation, Storage
from fxmem.units import format_bytes

_DETACH = "aten.detach.default"
"""Of tensors that are saved, between operators that run again."""
_PARTS = 8
_NEARLY = 1.05


def find_wide_checkpoints(analysis: Analysis) -> Iterator[Finding]:
    """Simulates checkpoints around parts of what is computed again at once.

    Parts end where the fewest bytes go from one to the next.
    """
    operations = analysis.allocated_graph.operations
    alive = {storage.index for storage in analysis.peak.live}
    for _, run in groupby(operations, lambda o: o.recomputed or o.name == _DETACH):
        region = [operation for operation in run if operation.recomputed]
        if not region:
            continue
        edit = StepEdit(analysis)
        held = [s for o in region for s in edit.made.get(o.index, ()) if s.index in alive]
        if 2 * sum(s.nbytes for s in held) < analysis.peak_bytes:  # a block among many
            continue
        parts = _divide(edit, region)
        if len(parts) > 1 and _checkpoint_each(edit, region, parts):
            node = edit.nodes[region[0].node or 0]
            yield edit.make_finding(
                code="FX106",
                change=f"Checkpoint {len(parts)} parts of {node.name} instead of all at once: what "
                f"is computed again holds {format_bytes(sum(s.nbytes for s in held))} at the peak",
                option="for layer in layers: x = checkpoint(layer, x, use_reentrant=False)",
                cost="None: each part still runs twice.",
                source=node.source,
            )


def _divide(edit: StepEdit, region: Sequence[Operation]) -> list[list[Operation]]:
    """Divides operations into parts that keep about as much, where little goes across."""
    last_read: dict[int, int] = {}
    for place, operation in enumerate(region):
        last_read |= dict.fromkeys(operation.reads, place)
    across, kept = [0] * len(region), [0] * len(region)
    for place, operation in enumerate(region):
        for storage in edit.made.get(operation.index, ()):
            kept[place] += storage.nbytes * (_outlives(storage, region))
            across[place] += storage.nbytes
            across[last_read.get(storage.index, place)] -= storage.nbytes
    across = [*accumulate(across)]
    # A part may end after an operation: the last has nothing behind it.
    least = min(filter(None, across[:-1]), default=0)
    ends = [place for place, nbytes in enumerate(across[:-1]) if 0 < nbytes <= _NEARLY * least]
    sums = [*accumulate(kept)]
    chosen = {
        min(ends, key=lambda end: abs(sums[end] - sums[-1] * part / _PARTS))
        for part in range(1, _PARTS)
        if ends
    }
    starts = [0, *(end + 1 for end in sorted(chosen)), len(region)]
    return [[*region[a:b]] for a, b in pairwise(starts)]


def _outlives(storage: Storage, region: Sequence[Operation]) -> bool:
    return storage.died is None or storage.died > region[-1].index


def _checkpoint_each(
    edit: StepEdit, region: Sequence[Operation], parts: Sequence[Sequence[Operation]]
) -> bool:
    """Lets each part be computed again where its own backward begins; returns whether it can be.

    What goes to the next part is kept from forward.
    """
    forward = iter(edit.list_forward({region[0].node}))
    first_run = {
        again.index: next((first for first in forward if first.name == again.name), None)
        for again in region
    }
    if None in first_run.values():
        return False
    for part in parts[:-1]:
        made = [s for o in part for s in edit.made.get(o.index, ())]
        kept = [s for s in made if _outlives(s, region)]
        later = (o.index for s in kept for o in edit.readers.get(s.index, ()))
        begin = min((index for index in later if index > region[-1].index), default=None)
        if begin is None:
            continue
        inside, kept_indices = {o.index for o in part}, {s.index for s in kept}
        for storage in made:
            users = {o.index for o in edit.readers.get(storage.index, ()) if o.recomputed}
            if users - inside:
                first = first_run[storage.born]
                edit.change(storage.index, born=first.index if first else storage.born)
            elif storage.index in kept_indices:
                edit.change(storage.index, born=begin)
            else:
                edit.change(storage.index, nbytes=0)
        passing = [s for s in made if s.index not in kept_indices]
        edit.add(_measure_most(passing), begin, begin)
    return True


def _measure_most(passing: Sequence[Storage]) -> int:
    """The most bytes at once of what lives only while a part is computed again."""
    changes: dict[int, int] = {}
    for storage in passing:
        if storage.died is not None:
            changes[storage.born] = changes.get(storage.born, 0) + storage.nbytes
            changes[storage.died + 1] = changes.get(storage.died + 1, 0) - storage.nbytes
    return max(accumulate(changes[index] for index in sorted(changes)), default=0)
