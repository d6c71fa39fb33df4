"""Memory of the batches of an epoch whose samples have different sizes.

A step is analysed with a few sizes; the memory graphs of all others follow from those
(:mod:`fxmem.memory.interpolation`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import nn

from fxmem.analysis import Analysis
from fxmem.analyzing import analyze
from fxmem.batching.batchings import Batching, SampleSizes, list_batchings, read_sizes
from fxmem.batching.epoch import SHARES, Batches, BatchingMemory
from fxmem.batching.sizes import Sizes
from fxmem.errors import TraceError, UsageError
from fxmem.graph import MemoryGraph
from fxmem.loading.importing import read_files_once
from fxmem.loading.inputs import find_axis, resize_inputs
from fxmem.memory.interpolation import choose_sizes, weigh_sizes
from fxmem.memory.succession import Fragmentation, replay_steps

_REPLAYED = 200
_CUT = 0.99  # share of the samples that are not cut
_CLOSE = 16  # sizes up to the longest, of which each may be the fullest


@read_files_once()
def batches(
    model: nn.Module | str,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    sizes: SampleSizes,
    axis: str | int = 1,
    cap: int | None = None,
    multiple_of: int = 1,
    replay: int = _REPLAYED,
    **options: Any,
) -> Batches:
    """Computes the memory of an epoch's batches, whose samples have different sizes.

    The batches are padded to their longest sample, and for comparison grouped by size, packed and
    cut. Of the padded ones some are replayed by the allocator, with several settings.

    Args:
        model: As for :func:`fxmem.analyze`.
        args: Positional inputs of one batch. Dimension 0 says how many samples a batch has.
        kwargs: Keyword inputs.
        sizes: The size of each sample; or a mapping of sizes to how many samples have them; or a
            range such as ``"64-2048"``; or the path of a JSON file with one of the former two.
        axis: The dimension that is padded, as for :func:`fxmem.max_batch`.
        cap: The size to which samples are cut in one of the ways, or in all where the model takes
            no longer ones. None for the size that 99 % of them do not exceed.
        multiple_of: Batches are padded to a multiple of this number.
        replay: How many of the padded batches the allocator replays.
        options: Other arguments of :func:`fxmem.analyze`: ``optimizer``, ``gpu``, ...

    Raises:
        UsageError: An argument is not understood.
        LoadError: The TARGET cannot be loaded.
        TraceError: The step cannot be run on fake tensors with such inputs.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(64, 256), nn.ReLU())
    >>> found = batches(net, "4x100x64", sizes={10: 500, 400: 4}, device="cpu")
    >>> [(each.batching.name, each.quantile_sizes) for each in found.batchings[:2]]
    [('padded', (10, 10, 400, 400)), ('grouped', (10, 10, 10, 400))]
    """
    if multiple_of < 1 or replay < 1 or (cap is not None and cap < 1):
        raise UsageError("the cap, the multiple and the replayed batches must be 1 or more")
    samples = read_sizes(sizes)
    found, rows = find_axis(args, kwargs, axis), find_axis(args, kwargs, 0)
    if 0 in {dim for dims in found.dims.values() for dim in dims}:
        raise UsageError("dimension 0 is the batch", hint="--axis 1, or 2,3 for images")
    dims = max(len(each) for each in found.dims.values())
    cut = cap or sorted(samples)[math.ceil(_CUT * len(samples)) - 1]
    ways = list_batchings(samples, rows.size, cap=cut, unit=multiple_of, dims=dims)

    def analyze_size(size: int, count: int = rows.size) -> Analysis:
        inputs = resize_inputs(args, kwargs, found, size)
        if count != rows.size:
            inputs = resize_inputs(*inputs, rows, count)
        try:
            return analyze(model, *inputs, **options)
        except TraceError as error:
            raise TraceError(
                f"at size {size}: {error.cause}",
                hint="where the model refuses the size, give --multiple-of or --cap",
            ) from error

    known, notes = Sizes(analyze_size, ways[0].sizes[0], 1, True), []
    try:
        known.analyze(max(ways[0].sizes))
    except TraceError as error:
        if cap is None or ways[-1].name != "capped":
            raise
        ways, notes = ways[-1:], [f"All samples are cut at {cut:,}: {error.cause}."]
    alike = [way for way in ways if way.name != "packed"]
    shown = {size for way in alike for size in _list_quantiles(sorted(way.sizes))}
    for size in sorted({*shown, min(min(way.sizes) for way in alike)} - known.analyses.keys()):
        known.analyze(size)
    for size in {_find_fullest(known, way.sizes) for way in alike} - known.analyses.keys():
        known.analyze(size)
    packed = {
        way.rows: analyze_size(way.sizes[0], way.rows)
        for way in ways
        if way.name == "packed" and way.rows != rows.size
    }
    first = known.analyses[_find_fullest(known, ways[0].sizes)]
    return Batches(
        replace(first.setup, notes=(*first.setup.notes, *notes)),
        found.label,
        len(samples),
        tuple(_measure(way, known, packed.get(way.rows)) for way in ways),
        _replay(known, ways[0].sizes[:replay], first),
        len(known.analyses) + len(packed),
        _measure_error(known),
    )


def _list_quantiles(ranked: Sequence[int]) -> tuple[int, ...]:
    return tuple(ranked[int(share * (len(ranked) - 1))] for share in SHARES)


def _find_fullest(known: Sizes, sizes: Sequence[int]) -> int:
    """Finds the size whose step takes the most.

    The allocator's blocks lie otherwise with each size, so one below the longest may take more.
    """
    close = sorted({*sizes})[-_CLOSE:]
    found = {size: known.analyses.get(size) or known.interpolate(size) for size in close}
    return max((each.peak_bytes, size) for size, each in found.items() if each is not None)[1]


def _find_analysis(known: Sizes, size: int) -> Analysis:
    """Finds the analysis of a size, or computes it; where others are not alike, makes it."""
    return known.analyses.get(size) or known.interpolate(size) or known.analyze(size)


def _measure(way: Batching, known: Sizes, own: Analysis | None) -> BatchingMemory:
    """Measures the steps of a way of making batches; its own analysis is of all of its steps."""
    ranked = sorted(way.sizes)
    quantiles = _list_quantiles(ranked)
    analyses = {size: own or known.analyses.get(size) for size in {*ranked}}
    peaks = {size: each.peak_bytes for size, each in analyses.items() if each is not None}
    fullest = max(peaks, key=lambda size: (peaks[size], size))
    flops = sum(
        count * _count_flops(known, size) for size, count in Counter(way.sizes).items() if not own
    )
    return BatchingMemory(
        way,
        way.sizes.index(fullest) + 1,
        quantiles,
        tuple(max(peaks[each] for each in peaks if each <= size) for size in quantiles),
        flops + (len(ranked) * (own.forward_flops + own.backward_flops) if own else 0),
        _count_unfitting(ranked, known, own),
    )


def _count_flops(known: Sizes, size: int) -> int:
    """Computes the FLOPs of a step, a polynomial of the second degree."""
    at = choose_sizes(known.analyses, size)
    flops = [
        known.analyses[each].forward_flops + known.analyses[each].backward_flops for each in at
    ]
    weights = weigh_sizes(at, size)
    return round(sum(weight * each for weight, each in zip(weights, flops, strict=True)))


def _count_unfitting(ranked: Sequence[int], known: Sizes, own: Analysis | None) -> int | None:
    if next(iter(known.analyses.values())).device_run is None:
        return None
    if own is not None:
        return len(ranked) * (own.exhaustion is not None)
    first = bisect_left(
        ranked, True, key=lambda size: _find_analysis(known, size).exhaustion is not None
    )
    return len(ranked) - first


def _replay(known: Sizes, sizes: Sequence[int], first: Analysis) -> tuple[Fragmentation, ...]:
    """Replays steps of these sizes, on the device of an analysis."""
    if first.settings is None:
        return ()

    @lru_cache(maxsize=16)
    def find_graph(size: int) -> MemoryGraph:
        return _find_analysis(known, size).graph

    return replay_steps(
        find_graph(sizes[0]),
        map(find_graph, sizes),
        first.settings,
        capacity_bytes=None if first.gpu is None else first.gpu.capacity_bytes,
        context_bytes=max(first.context_bytes),
    )


def _measure_error(known: Sizes) -> float:
    """Measures how far the peak of each analysed size is from the one computed from the others."""
    errors = [0.0]
    for size, analysis in sorted(known.analyses.items())[1:-1]:
        others = {at: each for at, each in known.analyses.items() if at != size}
        computed = replace(known, analyses=others).interpolate(size)
        if computed is not None:
            errors.append(abs(computed.peak_bytes / analysis.peak_bytes - 1))
    return max(errors)
