"""The search for meshes and knobs that fit, from few recordings.

Memory falls with the number of shards and with more checkpointing: what does not fit the larger
shards of one mesh is not tried on another with less. Storages of replicated shards are linear in
the number of replicas, so two recordings determine all meshes between
(:mod:`fxmem.memory.interpolation`).
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import nn

from fxmem.analysis import Analysis
from fxmem.analyzing import analyze
from fxmem.errors import TraceError, UsageError
from fxmem.fitting.meshes import Fitting, MeshFit, Place
from fxmem.graph import Operation
from fxmem.loading.importing import read_files_once
from fxmem.memory.interpolation import describe_structure, interpolate_graph
from fxmem.parallelism.checkpointing import CHECKPOINTS, find_blocks
from fxmem.parallelism.layout import NO_KNOBS, Knobs, Mesh, Tuned, Way
from fxmem.training.options import DtypeChoice, name_choice, resolve_dtype
from fxmem.units import format_bytes


@read_files_once()
def fit(
    model: nn.Module | str,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    gpu: str,
    gpus: int = 8,
    gpus_per_node: int = 8,
    parallelize: Way = None,
    mesh: Mapping[str, int | None] | None = None,
    mixed_precision: DtypeChoice = None,
    **options: Any,
) -> Fitting:
    """Searches device meshes and settings with which one rank's step fits the GPU.

    Without a function, ``fully_shard`` over all GPUs and over replicated parts of them is compared
    with ``DistributedDataParallel``. A mesh is tried without checkpointing first, then with more of
    it, where that does not fit; without resharding after forward, and with it; with
    ``CPUOffloadPolicy`` where nothing else fits on any mesh; under DDP also with
    ``ZeroRedundancyOptimizer``.

    Args:
        model: As for :func:`fxmem.analyze`.
        args: Positional inputs, the batch of one rank.
        kwargs: Keyword inputs.
        gpu: The GPU, as for :func:`fxmem.analyze`.
        gpus: How many there are.
        gpus_per_node: How many consecutive ranks share a node.
        parallelize: ``"fsdp"`` or ``"ddp"`` for one of them alone; or a function as for
            :func:`fxmem.analyze`, or a TARGET: checkpoints are put on its blocks, unless it has
            put ``checkpoint_wrapper`` on some.
        mesh: The function's mesh, with None for sizes that are left open, ``{"dp": None, "tp":
            None}``: the first takes what the others leave, which are powers of two within a node.
        mixed_precision: The dtype of parameters in forward and backward, ``"bf16"``:
            ``MixedPrecisionPolicy``, with gradients reduced in float32; autocast under DDP.
        options: Other arguments of :func:`fxmem.analyze`: ``optimizer``, ``loss``, ...

    Returns:
        The meshes with their knobs: the fitting ones first, cheapest communication first.

    Raises:
        UsageError: An argument is not understood.
        LoadError: The TARGET cannot be loaded.
        TraceError: The step cannot be run on fake tensors.

    >>> from torch import nn
    >>> found = fit(nn.Linear(64, 64), "8x64", gpu="t4", gpus=2, parallelize="ddp")
    >>> found.best.mesh, found.best.far_bytes, found.recordings
    ({'dp': 2}, 0, 1)
    """
    if gpus < 1 or gpus_per_node < 1:
        raise UsageError(f"{min(gpus, gpus_per_node)} GPUs", hint="1 or more")
    if mesh is not None and parallelize in (None, "fsdp", "ddp"):
        raise UsageError("a mesh without a function", hint="parallelize=function")
    if mixed_precision is not None and parallelize not in (None, "fsdp", "ddp"):
        raise UsageError(
            "mixed_precision is for fsdp and ddp", hint="set MixedPrecisionPolicy in the function"
        )
    dtype = resolve_dtype(mixed_precision)

    def record(place: Place, knobs: Knobs) -> Analysis:
        tuned = Tuned(place.parallelize, knobs)
        given: dict[str, Any] = {"mesh": dict(place.mesh), "parallelize": tuned}
        if place.parallelize == "ddp" and dtype is not None:
            given["autocast"] = dtype
        return analyze(model, args, kwargs, gpu=gpu, **{**options, **given})

    search, rows = Search(record, gpus_per_node), list[MeshFit]()
    if parallelize in (None, "fsdp"):
        rows += search.search_shards(gpus, dtype)
    if parallelize in (None, "ddp"):
        rows += search.search_replicas(gpus)
    if parallelize not in (None, "fsdp", "ddp"):
        for shape in _list_shapes(mesh or {"dp": None}, gpus, gpus_per_node):
            rows += search.search_mesh(Place(shape, parallelize), NO_KNOBS)
    if not search.recorded:
        raise next(iter(search.refused.values()))
    first = next(iter(search.recorded.values()))
    assert first.gpu is not None
    return Fitting(
        rows=tuple(sorted(rows, key=MeshFit.sort_key)),
        setup=replace(first.setup, mesh=None, parallelize=None),
        gpu=first.gpu.name,
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        capacity_bytes=first.gpu.capacity_bytes,
        mixed_precision=dtype,
        recordings=len(search.recorded),
    )


def _list_shapes(mesh: Mapping[str, int | None], gpus: int, per_node: int) -> list[Mesh]:
    """Lists meshes whose sizes are left open: the first one takes what the others leave.

    The others are powers of two within a node.

    >>> _list_shapes({"dp": None, "tp": None}, 16, 2)
    [(('dp', 16), ('tp', 1)), (('dp', 8), ('tp', 2))]
    """
    free = [name for name, size in mesh.items() if size is None]
    fixed = math.prod(size for size in mesh.values() if size is not None)
    powers = [1 << power for power in range(per_node.bit_length())]
    shapes: list[Mesh] = []
    for sizes in product(powers, repeat=max(len(free) - 1, 0)):
        taken = fixed * math.prod(sizes)
        if gpus % taken == 0 and (free or taken == gpus):
            filled = {**mesh, **dict(zip(free, (gpus // taken, *sizes), strict=False))}
            shapes.append(tuple((name, size or 1) for name, size in filled.items()))
    if not shapes:
        raise UsageError(f"no mesh {dict(mesh)!r} has {gpus} processes", hint="dp=*,tp=*")
    return shapes


@dataclass
class Search:
    """Steps that were recorded on meshes, and those computed from them."""

    record: Callable[[Place, Knobs], Analysis]
    gpus_per_node: int  # how many consecutive ranks share a node
    recorded: dict[tuple[Place, Knobs], Analysis] = field(default_factory=dict)
    computed: dict[tuple[Place, Knobs], Analysis] = field(default_factory=dict)
    # errors of places where the model cannot be laid out
    refused: dict[Place, TraceError] = field(default_factory=dict)
    # most shards with which the step does not fit, by knobs: nor does it with fewer
    failed: dict[Knobs, int] = field(default_factory=dict)

    def search_shards(self, gpus: int, dtype: str | None) -> list[MeshFit]:
        """Searches meshes under ``fully_shard``: over all GPUs, and over parts of them."""
        parts: list[Mesh] = [
            (("replicate", gpus // shards), ("shard", shards))
            for power in range(gpus.bit_length())
            if (shards := self.gpus_per_node << power) < gpus and gpus % shards == 0
        ]
        # Those with the most and the fewest shards come first: the others are computed from them.
        shapes: list[Mesh] = [(("dp", gpus),), *parts[-1:], *parts[:-1]]
        places = [Place(shape, "fsdp") for shape in shapes]
        freed = Knobs(param_dtype=dtype)
        rows = list[MeshFit]()
        for place in places:
            kept = self.find_row(place, replace(freed, reshards=False))
            ways = CHECKPOINTS[: CHECKPOINTS.index(kept.knobs.checkpoint)] if kept else CHECKPOINTS
            found = [row for row in (kept, self.find_row(place, freed, ways)) if row]
            rows += found or [self.describe_failure(place, freed)]
        if all(row.fits != "yes" for row in rows):
            rows = [row for row in rows if row.fits == "maybe"]
            for place in places:
                rows += self.search_mesh(place, replace(freed, offloads=True))
        return rows

    def search_replicas(self, gpus: int) -> list[MeshFit]:
        """Searches ``DistributedDataParallel``, with all of the optimizer's state or a part."""
        place = Place((("dp", gpus),), "ddp")
        rows = self.search_mesh(place, NO_KNOBS)
        has_state = any(analysis.optimizer_state_bytes for analysis in self.recorded.values())
        if rows[0].fits != "yes" and has_state:
            rows = self.search_mesh(place, Knobs(shards_state=True))
        return rows

    def search_mesh(self, place: Place, knobs: Knobs) -> list[MeshFit]:
        """Searches the ways to checkpoint for the first that fits."""
        return [self.find_row(place, knobs) or self.describe_failure(place, knobs)]

    def find_row(
        self, place: Place, knobs: Knobs, ways: Sequence[str] = CHECKPOINTS
    ) -> MeshFit | None:
        """Finds the first way to checkpoint with which the step fits; None where none does."""
        for way in ways:
            chosen = replace(knobs, checkpoint=way)
            if way != "none" and not self._has_blocks():
                return None
            if way == "layers:2" and not self.fits(place, replace(knobs, checkpoint="full")):
                return None  # which takes the least
            if self.fits(place, chosen):
                return self.describe(place, chosen)
        return None

    def fits(self, place: Place, knobs: Knobs) -> bool:
        """Returns whether a step fits for certain, with as few recordings as possible."""
        is_sharded = place.parallelize == "fsdp"
        if place in self.refused or (is_sharded and place.shards <= self.failed.get(knobs, 0)):
            return False
        if self._find_excess(place, knobs):
            return False
        try:
            is_fit = self._analyze(place, knobs).exhaustion is None
        except TraceError as error:  # such as heads that a size does not divide
            if not self.recorded and place.parallelize in ("fsdp", "ddp"):
                raise
            self.refused[place] = error
            return False
        if not is_fit and is_sharded:
            self.failed[knobs] = place.shards
        return is_fit

    def _find_excess(self, place: Place, knobs: Knobs) -> str:
        """Finds why a step cannot fit, by what others take that were analysed."""
        if not self.recorded:
            return ""
        first = next(iter(self.recorded.values()))
        assert first.gpu is not None
        room_bytes = first.gpu.capacity_bytes - min(first.context_bytes)
        params_bytes, gradients_bytes, state_bytes = self._measure_kept(place, knobs)
        kept_bytes = params_bytes + gradients_bytes + state_bytes
        if kept_bytes > room_bytes:
            return f"parameters, gradients and optimizer state take {format_bytes(kept_bytes)}"
        for (known, used), analysis in {**self.recorded, **self.computed}.items():
            least_bytes = analysis.requested_bytes
            if known != place:
                kept = self._measure_kept(known, knobs)
                least_bytes += params_bytes + state_bytes - kept[0] - kept[2]
            if used.checkpoint != knobs.checkpoint:
                least_bytes -= analysis.saved_bytes
            if knobs.reshards and not used.reshards:
                least_bytes -= _measure_parameters(analysis, knobs.param_dtype)
            others = replace(knobs, checkpoint=used.checkpoint, reshards=used.reshards)
            is_more = known == place or "fsdp" == known.parallelize == place.parallelize
            is_bound = used.checkpoint in ("none", knobs.checkpoint) and used == others and is_more
            if is_bound and known.shards >= place.shards and least_bytes > room_bytes:
                return f"at least {format_bytes(least_bytes)} are allocated"
        return ""

    def _measure_kept(self, place: Place, knobs: Knobs) -> tuple[int, int, int]:
        """Measures parameters, gradients and optimizer state, by what a recorded step keeps.

        Zero where a function decides.
        """
        (known, _), first = next(iter(self.recorded.items()))
        is_plain = known.parallelize in ("fsdp", "ddp") and place.parallelize in ("fsdp", "ddp")
        if not is_plain or knobs.offloads or not first.parameter_bytes:
            return 0, 0, 0
        whole_bytes = _measure_parameters(first)

        def scale(nbytes: int, parts: int = place.shards) -> int:
            return whole_bytes * nbytes // first.parameter_bytes // parts

        copies = 2 if place.parallelize == "ddp" else 1  # buckets, beside the gradients
        size = math.prod(size for _, size in place.mesh)
        return (
            scale(first.parameter_bytes),
            copies * scale(first.gradient_bytes),
            scale(first.optimizer_state_bytes, size if knobs.shards_state else place.shards),
        )

    def _has_blocks(self) -> bool:
        analysis = next(iter(self.recorded.values()), None)
        if analysis is None:
            return True
        return analysis.setup.mode == "train" and bool(find_blocks(analysis.blueprint.model))

    def _analyze(self, place: Place, knobs: Knobs) -> Analysis:
        key = place, knobs
        if key not in self.recorded and key not in self.computed:
            computed = self._interpolate(place, knobs)
            if computed is not None:
                self.computed[key] = computed
            else:
                with warnings.catch_warnings():
                    if self.recorded:  # the user hears once what there is to say
                        warnings.simplefilter("ignore")
                    self.recorded[key] = self.record(place, knobs)
        return self.recorded.get(key) or self.computed[key]

    def _interpolate(self, place: Place, knobs: Knobs) -> Analysis | None:
        """Computes a step of replicated shards from two others, where no shard is padded."""
        if place.parallelize != "fsdp" or place.replicas == 1:
            return None
        alike = {
            known.replicas: analysis
            for (known, used), analysis in self.recorded.items()
            if used == knobs and known.replicas > 1 and _is_even(analysis, known.shards)
        }
        analyses = [*alike.values()]
        structures = {describe_structure(analysis.graph) for analysis in analyses}
        if len(alike) < 2 or len(structures) > 1 or not _is_even(analyses[0], place.shards):
            return None
        graphs = {replicas: analysis.graph for replicas, analysis in alike.items()}
        return replace(analyses[0], graph=interpolate_graph(graphs, place.replicas))

    def describe_failure(self, place: Place, knobs: Knobs) -> MeshFit:
        """Describes the step with the lowest peak; none fits."""
        known = {**self.recorded, **self.computed}
        tried = [(step.peak_bytes, used) for (at, used), step in known.items() if at == place]
        if tried:
            return self.describe(place, min(tried, key=lambda pair: pair[0])[1])
        if place in self.refused:
            cause = self.refused[place].cause
        else:
            knobs = replace(knobs, checkpoint="full" if self._has_blocks() else "none")
            cause = self._find_excess(place, knobs) or "it does not fit with more shards"
        return MeshFit(dict(place.mesh), _name(place), knobs, "no", cause, None, None)

    def describe(self, place: Place, knobs: Knobs) -> MeshFit:
        """Describes an analysed step."""
        analysis, ran_out = self._analyze(place, knobs), self._analyze(place, knobs).exhaustion
        sent = Counter[str]()
        flops, far_bytes = Counter[bool](), 0
        for operation in analysis.graph.operations:
            flops[operation.recomputed] += operation.flops
            if operation.group:
                sent["+".join(operation.group)] += operation.communication_bytes
                far_bytes += self._measure_far(place, operation)
        return MeshFit(
            mesh=dict(place.mesh),
            parallelize=_name(place),
            knobs=knobs,
            fits="yes" if ran_out is None else "no" if ran_out.is_certain else "maybe",
            cause="" if ran_out is None else ran_out.cause,
            peak_bytes=analysis.peak_bytes,
            reserved_bytes=analysis.reserved_bytes,
            sent_bytes=dict(sent),
            near_bytes=sum(sent.values()) - far_bytes,
            far_bytes=far_bytes,
            flops=flops[False],
            recomputed_flops=flops[True],
            is_recorded=(place, knobs) in self.recorded,
        )

    def _measure_far(self, place: Place, operation: Operation) -> int:
        """Measures what goes to another node: of a ring, one of the links that start in a node."""
        ranks = [0]
        for name, size in place.mesh:
            along = range(size) if name in operation.group else (0,)
            ranks = [rank * size + at for rank in ranks for at in along]
        near = sum(rank < self.gpus_per_node for rank in ranks)
        return 0 if near == len(ranks) else operation.communication_bytes // near


def _measure_parameters(analysis: Analysis, dtype: str | None = None) -> int:
    """Measures all parameters of a model, in a dtype or in that of the step."""
    dtype = dtype or analysis.blueprint.options.dtype
    size = 0 if dtype is None else getattr(torch, dtype).itemsize
    return sum(
        parameter.numel() * (size if size and parameter.is_floating_point() else parameter.itemsize)
        for parameter in analysis.blueprint.model.parameters()
    )


def _is_even(analysis: Analysis, shards: int) -> bool:
    parameters = analysis.blueprint.model.parameters()
    return all(parameter.shape[0] % shards == 0 for parameter in parameters if parameter.ndim)


def _name(place: Place) -> str:
    return name_choice(place.parallelize) or ""
