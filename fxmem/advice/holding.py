"""FX104, FX105, FX201, FX303: what is held longer than it is needed, or could be elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from fxmem.advice.editing import CAST, FORWARD, StepEdit
from fxmem.analysis import Analysis
from fxmem.finding import Finding
from fxmem.graph import RESIDENT, Category, MemoryGraph, Operation, Phase, Save, Storage
from fxmem.memory.liveness import find_updated
from fxmem.units import format_bytes

_LEAST_BYTES = 1 << 20
_CACHES = "cache_utils.py"
"""The file of transformers whose lines make the tensors of a cache."""


def find_cache(analysis: Analysis) -> Iterator[Finding]:
    """Simulates a forward that returns no cache of keys and values."""
    edit = StepEdit(analysis)
    released: dict[int, int] = {}
    for save in edit.graph.saves:
        released[save.storage] = max(released.get(save.storage, 0), save.released or 0)
    cached = [
        storage
        for storage in edit.graph.storages
        if storage.died is None and storage.born != RESIDENT and storage.node is not None
        if (source := edit.nodes[storage.node].source) and source.file.endswith(_CACHES)
    ]
    ends = {o.node: o.index for o in edit.graph.operations if o.phase is Phase.FORWARD}
    for storage in cached:
        uses = (ends.get(o.node, o.index) for o in edit.readers.get(storage.index, ()))
        edit.change(storage.index, died=max([released.get(storage.index, 0), storage.born, *uses]))
    if cached:
        yield edit.make_finding(
            code="FX104",
            change="Return no cache of keys and values, which holds "
            f"{format_bytes(sum(storage.nbytes for storage in cached))} to the end of the step",
            option="model(..., use_cache=False), or model.config.use_cache = False",
            cost="None, unless the output's past_key_values are used: generate() needs them.",
            source=edit.nodes[cached[0].node or 0].source,
        )


def find_held_outputs(analysis: Analysis) -> Iterator[Finding]:
    """Simulates a loop that lets go of output and loss at the end of each iteration."""
    edit = StepEdit(analysis)
    graph = edit.graph
    held = [s for s in graph.storages if s.category is Category.OUTPUT and s.born == RESIDENT]
    for storage in held:
        edit.change(storage.index, nbytes=0)
    if held:
        made = {(s.shape, s.dtype): s.node for s in graph.storages if s.born != RESIDENT}
        largest = max(held, key=lambda storage: storage.nbytes)
        node = made.get((largest.shape, largest.dtype))
        yield edit.make_finding(
            code="FX105",
            change="Let go of output and loss at the end of each iteration: those of the step "
            f"before hold {format_bytes(sum(storage.nbytes for storage in held))}",
            option="del output, loss",
            cost="None.",
            source=None if node is None else graph.nodes[node].source,
        )


def find_gradients(analysis: Analysis) -> Iterator[Finding]:
    """Simulates an optimizer that updates each parameter once its gradient is there.

    What the optimizer takes for several at a time is shared out by their sizes.
    """
    graph = analysis.allocated_graph
    steps = [o for o in graph.operations if o.phase is Phase.OPTIMIZER]
    gradients = [s for s in graph.storages if s.category is Category.GRADIENT]
    if not steps or _are_needed_together(graph, gradients):
        return
    edit = StepEdit(analysis)
    sizes = {s.name: s.nbytes for s in graph.storages if s.category is Category.PARAMETER}
    begin, live = steps[0].index, 0
    temporary = [s for s in graph.storages if s.born >= begin and s.category is Category.TEMPORARY]
    freed_bytes = Counter[int | None]()
    for storage in temporary:
        freed_bytes[storage.died] += storage.nbytes
    own: dict[str, float] = {}  # what the update of a parameter alone takes
    share = 0.0  # of the bytes of parameters that are updated together
    for operation in steps:
        made = edit.made.get(operation.index, ())
        live += sum(s.nbytes for s in made if s.category is Category.TEMPORARY)
        names = find_updated(graph, operation)
        nbytes, updated = live + operation.workspace_bytes, sum(sizes.get(n, 0) for n in names)
        if len(names) == 1:
            own[names[0]] = max(own.get(names[0], 0), nbytes)
        elif updated:
            share = max(share, nbytes / updated)
        live -= freed_bytes[operation.index]
    for storage in temporary:
        edit.change(storage.index, nbytes=0)
    for storage in gradients:
        if storage.born == RESIDENT:  # of the step before, where zero_grad runs after forward
            edit.change(storage.index, nbytes=0)
        elif storage.died is None:
            uses = edit.readers.get(storage.index, ())
            last = max([storage.born, *(o.index for o in uses if o.phase is Phase.BACKWARD)])
            edit.change(storage.index, died=last)
            name = storage.name.removesuffix(".grad")
            update_bytes = own.get(name, share * sizes.get(name, storage.nbytes))
            edit.add(int(update_bytes), last, last)
    for operation in steps:
        edit.clear_workspace(operation.index)
    yield edit.make_finding(
        code="FX201",
        change="Update each parameter in backward once its gradient is there, and free the "
        f"gradient: all of them take {format_bytes(analysis.gradient_bytes)}",
        option="parameter.register_post_accumulate_grad_hook(step), with an optimizer for each "
        "parameter",
        cost="No clipping by the norm of all gradients, no accumulation over micro-batches, no "
        "GradScaler.",
    )


def _are_needed_together(graph: MemoryGraph, gradients: Sequence[Storage]) -> bool:
    """Returns whether gradients are kept across steps, accumulated, clipped or unscaled."""
    indices = {storage.index for storage in gradients}
    first = next((o.index for o in graph.operations if o.phase is Phase.BACKWARD), 0)
    return (
        any(s.born == RESIDENT and s.died is None for s in gradients)
        or any(o.index > first and o.phase is Phase.FORWARD for o in graph.operations)
        or any(
            ("norm" in o.name or "_amp_" in o.name) and not indices.isdisjoint(o.reads)
            for o in graph.operations
            if o.index > first
        )
    )


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
