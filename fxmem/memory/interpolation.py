"""Memory graphs for input sizes between or beyond the recorded ones.

The bytes of a storage are a polynomial of the batch, the sequence length or the resolution: of the
first degree for most, of the second for scores of attention and for images. So the graphs of two
or three sizes determine the graph of another, as long as the same operators run.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from fxmem.graph import MemoryGraph, Operation

_MOST = 3  # sizes, for polynomials of the second degree


def describe_structure(graph: MemoryGraph) -> Hashable:
    """Describes the operators and lifetimes of a graph: graphs can be interpolated where equal."""
    storages = tuple((s.born, s.died, s.category) for s in graph.storages)
    freed = sorted((s.died, s.death_rank, s.index) for s in graph.storages if s.died is not None)
    operators = tuple((o.name, o.node) for o in graph.operations)
    return storages, tuple(index for *_, index in freed), operators


def interpolate_graph(graphs: Mapping[int, MemoryGraph], size: int) -> MemoryGraph:
    """Computes the memory graph of a size from two or more graphs of one structure.

    Kernels with other blocks inside from some size on, and what led to the step, are interpolated
    among the graphs that are there like that of the nearest size.

    Args:
        graphs: The graphs by their sizes. Three are used.
        size: The size that a graph is wanted of.
    """
    near = choose_sizes(graphs, size)
    known = [graphs[at] for at in near]
    weights: dict[tuple[int, ...], list[float]] = {}

    def mix(values: Sequence[int], among: tuple[int, ...] = tuple(near)) -> int:
        first = values[0]
        if all(value == first for value in values):
            return first
        if among not in weights:
            weights[among] = weigh_sizes(among, size)
        mixed = round(sum(w * v for w, v in zip(weights[among], values, strict=True)))
        return max(mixed, 0) if max(values) > 0 else min(mixed, 0)  # frees are negative

    def mix_operation(same: Sequence[Operation]) -> Operation:
        first = same[0]
        sums = ("workspace_bytes", "flops", "library_bytes", "communication_bytes")
        if not any(getattr(o, name) for o in same for name in sums):
            return first
        blocks = [number for number, _ in first.blocks]
        alike = [at for at, o in enumerate(same) if [number for number, _ in o.blocks] == blocks]
        among, like = tuple(near[at] for at in alike), [same[at] for at in alike]
        return replace(
            first,
            workspace_bytes=mix([o.workspace_bytes for o in like], among),
            flops=mix([o.flops for o in same]),
            library_bytes=mix([o.library_bytes for o in same]),
            communication_bytes=mix([o.communication_bytes for o in same]),
            blocks=tuple(
                (number, mix([o.blocks[at][1] for o in like], among))
                for at, number in enumerate(blocks)
            ),
        )

    led = [[storage for storage, _ in graph.warmup] for graph in known]
    alike = [at for at, storages in enumerate(led) if storages == led[0]]
    among = tuple(near[at] for at in alike)
    return replace(
        known[0],
        storages=tuple(
            replace(same[0], nbytes=mix([storage.nbytes for storage in same]))
            for same in zip(*(graph.storages for graph in known), strict=True)
        ),
        operations=tuple(
            map(mix_operation, zip(*(graph.operations for graph in known), strict=True))
        ),
        warmup=tuple(
            (same[0][0], mix([nbytes for _, nbytes in same], among))
            for same in zip(*(known[at].warmup for at in alike), strict=True)
        ),
    )


def choose_sizes(known: Iterable[int], size: int) -> list[int]:
    """Chooses the known sizes from which another is computed: three, the nearest first.

    Images of odd sides have roundings, which weights enlarge: of those that go with the nearest
    size, two are chosen whose weights are smallest, and so around the other size rather than beside
    it.

    >>> choose_sizes([160, 338, 497, 508, 510, 512], 345)
    [338, 497, 160]
    """
    nearest, *others = sorted(known, key=lambda each: abs(each - size))
    triples = [[nearest, *pair] for pair in itertools.combinations(others, _MOST - 1)]
    weighed = [(round(sum(map(abs, weigh_sizes(each, size))), 2), each) for each in triples]
    return min(weighed, key=lambda each: each[0])[1] if weighed else [nearest, *others]


def weigh_sizes(sizes: Sequence[int], size: int) -> list[float]:
    """Computes the weights of known sizes in another: Lagrange's polynomials."""
    weights = [1.0] * len(sizes)
    for at, known in enumerate(sizes):
        for other in sizes:
            if other != known:
                weights[at] *= (size - other) / (known - other)
    return weights
