"""The step of a model whose plan was applied, computed from the step that was recorded.

Forward keeps a tensor as long as the rewritten graph does, whose every value goes after its last
use, or as long as the user's code did where that is what runs; autograd keeps what nodes outside
of all regions save. Before backward takes out the first thing that a region would have saved, the
region runs again, up to the last thing that it saves, and what it saves lives until its function's
backward is over. What runs in which order is that of ``torch/utils/checkpoint.py``:
``_checkpoint_without_reentrant_generator`` with early stop.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from fxmem.graph import RESIDENT, Category, MemoryGraph, Phase, Save, Storage
from fxmem.planning.facts import Made, StepFacts
from fxmem.planning.regions import Region, iterate_regions
from fxmem.timeline import build_timeline


@dataclass(slots=True)
class Run:
    """A region that is computed again."""

    region: Region
    depth: int
    trigger: int  # before which operation of backward
    first: int  # the operations of forward that run
    stop: int
    done: int  # after which operation of backward nothing of the region is needed
    saved: dict[int, list[int]]  # what it keeps itself, not the regions within, and how long
    casts: Sequence[tuple[int, int]] = ()  # what autocast casts anew, before which operation
    children: list[Run] = field(default_factory=list)
    base: int = 0  # where its first operation comes to stand

    @property
    def size(self) -> int:
        """How many operations run."""
        return self.stop - self.first + len(self.casts)

    @property
    def end(self) -> int:
        """Where its last operation comes to stand."""
        return self.base + self.size - 1

    def place(self, operation: int) -> int:
        """Where an operation of forward comes to stand, in it or after it was over."""
        operation = min(operation, self.stop - 1)
        casts = bisect_right(self.casts, operation, key=_get_operation) if self.casts else 0
        return self.base + operation - self.first + casts

    def iterate_casts(self) -> Iterator[tuple[int, int]]:
        """What autocast casts anew, each with where that comes to stand."""
        for number, (operation, storage) in enumerate(self.casts):
            yield self.base + operation - self.first + number, storage

    def list_operations(self, facts: StepFacts) -> list[int]:
        """The operations of forward that run, in order."""
        operations = [*range(self.first, self.stop)]
        for operation, storage in reversed(self.casts):
            operations.insert(operation - self.first, facts.makers[storage].born)
        return operations


def _get_operation(cast: tuple[int, int]) -> int:
    return cast[0]


@dataclass(frozen=True, slots=True)
class Life:
    """A storage of the rewritten step, in places of its operations."""

    storage: int
    born: int
    died: int | None


@dataclass(frozen=True, slots=True)
class Simulation:
    """A rewritten step.

    Attributes:
        facts: The step without the plan.
        order: The operations, each with whether it is computed again.
        lives: The storages.
        live_bytes: For each operation, the most bytes that are live while it runs.
    """

    facts: StepFacts
    order: tuple[tuple[int, bool], ...]
    lives: tuple[Life, ...]
    live_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """Most bytes at any moment."""
        return max(self.live_bytes)

    @property
    def recomputed(self) -> Iterator[int]:
        """The operations of forward that run again, each as often as it does."""
        return (index for index, again in self.order if again)


def simulate_regions(facts: StepFacts, regions: Sequence[Region]) -> Simulation:
    """The step of the rewritten graph with these regions.

    Args:
        facts: The step as it was recorded.
        regions: Apart from each other and in order.
    """
    runs = [*plan_runs(facts, regions)]
    order, places = _order_operations(facts, runs)
    lives = tuple(RegionLives(facts, regions, runs, places).iterate())
    return Simulation(facts, order, lives, _measure(facts, order, lives))


def build_graph(simulation: Simulation) -> MemoryGraph:
    """The memory graph of a rewritten step."""
    graph = simulation.facts.graph
    # Forward is as it was up to the first that runs again, and so is what it holds throughout.
    operations = tuple(
        graph.operations[index]
        if place == index and not again
        else replace(
            graph.operations[index],
            index=place,
            recomputed=again or graph.operations[index].recomputed,
            phase=Phase.BACKWARD if again else graph.operations[index].phase,
        )
        for place, (index, again) in enumerate(simulation.order)
    )
    storages: list[Storage] = []
    known = simulation.facts.storages
    for index, life in enumerate(simulation.lives):
        storage = known[life.storage]
        if (storage.index, storage.born, storage.died) != (index, life.born, life.died):
            storage = replace(storage, index=index, born=life.born, died=life.died)
        storages.append(storage)
    rewritten = replace(graph, operations=operations, storages=tuple(storages), saves=())
    return replace(rewritten, warmup=_warm_up(rewritten))


def _warm_up(graph: MemoryGraph) -> tuple[tuple[int | None, int], ...]:
    """What led to a rewritten step: all that is resident, and one such step.

    The state of the optimizer comes to be at the end of that step, before it updates anything.
    """
    if not graph.warmup:
        return ()
    resident = {s.index: s.nbytes for s in graph.storages if s.born == RESIDENT}
    seen = (index for index, nbytes in graph.warmup if nbytes > 0 and index in resident)
    order = dict.fromkeys(index for index in (*seen, *resident) if index is not None)
    states = [i for i in order if graph.storages[i].category is Category.OPTIMIZER_STATE]
    led: list[tuple[int | None, int]] = [(i, resident[i]) for i in order if i not in set(states)]
    for event in build_timeline(graph).events:
        if event.phase is Phase.OPTIMIZER:
            led += [(index, resident[index]) for index in states]
            states = []
        storage = event.storage
        if storage is None or storage not in resident:
            led.append((None if storage is None else ~storage, event.delta_bytes))
    led += [
        (~s.index, -s.nbytes)
        for s in graph.storages
        if s.died is None and s.index not in resident  # gradients, output and loss
    ]
    return tuple(led)


def plan_runs(facts: StepFacts, regions: Sequence[Region]) -> Iterator[Run]:
    """What runs again for some regions: those that backward needs, each with those within."""
    for region in regions:
        yield from _plan_region(facts, region, 0)


def _plan_region(facts: StepFacts, region: Region, depth: int) -> Iterator[Run]:
    """The run of a region, if backward needs it, and in it those of the regions within."""
    saves = [s for n in range(region.start, region.stop) for s in facts.saves_by_node[n]]
    unpacked = [save.unpacked for save in saves if save.unpacked is not None]
    if not unpacked:
        return
    direct = [save for save in saves if not any(save.node in c for c in region.children)]
    first = facts.first_operation[region.start]
    inputs = [facts.first_operation[child.start] for child in region.children]
    stop = max([first, *(save.position for save in direct), *inputs])
    yield Run(
        region,
        depth,
        trigger=min(unpacked),
        first=first,
        stop=stop,
        casts=_find_casts(facts, first, stop),
        done=max(save.released for save in saves if save.released is not None),
        saved=_group_releases(direct),
        children=[r for child in region.children for r in _plan_region(facts, child, depth + 1)],
    )


def _find_casts(facts: StepFacts, first: int, stop: int) -> list[tuple[int, int]]:
    """The casts of weights that forward found in autocast's cache; a run begins with an empty one.

    Source: ``_checkpoint_without_reentrant_generator`` enters autocast anew, and what
    ``torch/amp/autocast_mode.py`` does when the outermost one exits.
    """
    at = bisect_left(facts.casts, first, key=_get_operation)
    end = bisect_left(facts.casts, stop, key=_get_operation)
    anew: dict[int, int] = {}
    for operation, storage in facts.casts[at:end]:
        if facts.makers[storage].born < first:
            anew.setdefault(storage, operation)
    return [(operation, storage) for storage, operation in anew.items()]


def _group_releases(saves: Iterable[Save]) -> dict[int, list[int]]:
    released: dict[int, list[int]] = {}
    for save in saves:
        if save.released is not None:
            released.setdefault(save.storage, []).append(save.released)
    return released


def iterate_runs(runs: Sequence[Run]) -> Iterator[Run]:
    """All runs, each before those of the regions within."""
    for run in runs:
        yield run
        yield from iterate_runs(run.children)


def _order_operations(
    facts: StepFacts, runs: Sequence[Run]
) -> tuple[tuple[tuple[int, bool], ...], list[int]]:
    triggered: dict[int, list[Run]] = {}
    for run in iterate_runs(runs):  # what holds a region's inputs runs before it
        triggered.setdefault(run.trigger, []).append(run)
    order: list[tuple[int, bool]] = []
    places = []
    for index in range(len(facts.graph.operations)):
        for run in triggered.get(index, ()):
            run.base = len(order)
            order += [(again, True) for again in run.list_operations(facts)]
        places.append(len(order))
        order.append((index, False))
    return tuple(order), places


class RegionLives:
    """From when to when each storage lives, in forward and each time it is computed again."""

    def __init__(
        self,
        facts: StepFacts,
        regions: Sequence[Region],
        runs: Sequence[Run],
        places: Sequence[int],
    ) -> None:
        self._facts = facts
        self._runs = runs
        self._done = {run.region.start: run.done for run in runs}
        self._places = places
        self._paths: list[tuple[Region, ...]] = [()] * len(facts.graph.nodes)
        self._lay_paths(regions)

    def iterate(self) -> Iterator[Life]:
        for storage in self._facts.graph.storages:
            made = self._facts.makers.get(storage.index)
            if made is not None:
                yield self._live_in_forward(made)
                continue
            born = RESIDENT if storage.born == RESIDENT else self._places[storage.born]
            yield Life(storage.index, born, self._find_place(storage.died))
        yield from self.iterate_again()
        for index in _find_libraries(self._facts.graph, self._runs):
            yield Life(index, RESIDENT, None)

    def iterate_again(self) -> Iterator[Life]:
        """What regions make when they run again, and what their checkpoints keep."""
        for run in iterate_runs(self._runs):
            for again in self._facts.list_made(run.first, run.stop):
                yield self._live_again(again, run)
            for born, index in run.iterate_casts():
                kept = self._find_saved_ends(self._facts.makers[index], run)
                yield Life(index, born, max([run.end, *kept]))
            yield from self._live_beside(run)

    def find_forward_end(self, storage: Made) -> int:
        """The operation after which forward's frames let go of a storage."""
        return self._find_local_end(storage, 0)

    def _lay_paths(self, regions: Sequence[Region]) -> None:
        for region in regions:
            for node in range(region.start, region.stop):
                self._paths[node] = (*self._paths[node], region)
            self._lay_paths(region.children)

    def _find_place(self, operation: int | None) -> int | None:
        return None if operation is None else self._places[operation]

    def _live_in_forward(self, storage: Made) -> Life:
        """Held by forward's frames, by autograd outside of regions, and as a region's input."""
        born = self._places[storage.born]
        if storage.is_output:
            return Life(storage.index, born, None)
        ends = [self._find_local_end(storage, 0)]
        if storage.held_to is not None:
            ends.append(storage.held_to)
        for save in storage.saves:
            if save.node is None or not self._paths[save.node]:
                if save.released is None:
                    return Life(storage.index, born, self._find_place(self._died(storage)))
                ends.append(save.released)
        for node in (*storage.readers, *(first for first, _ in storage.takers)):
            path = self._paths[node]
            if path and path[0].start in self._done and _is_input(storage, path[0]):
                ends.append(self._done[path[0].start])
        return Life(storage.index, born, self._places[max(ends)])

    def _live_again(self, storage: Made, run: Run) -> Life:
        """Held by the run's frames, by what it saves, and as the input of a region within."""
        if storage.is_output and storage.index not in self._facts.graph.nodes[storage.node].results:
            # A module's hook puts it in the place of forward's, as it does a normalised weight.
            return Life(storage.index, run.place(storage.born), run.place(storage.born))
        end = run.place(self._find_local_end(storage, run.depth + 1, run))
        ends = [end, *self._find_saved_ends(storage, run)]
        if storage.is_cached:
            ends.append(run.end)
        for child in run.children:
            ends += self._find_input_ends(storage, child)
        return Life(storage.index, run.place(storage.born), max(ends))

    def _live_beside(self, run: Run) -> Iterator[Life]:
        """Copies of running statistics and states, those of the random number generator too."""
        facts, region = self._facts, run.region
        end = run.end
        if run.stop > run.first:
            for node in range(region.start, region.stop):
                for index in facts.statistics[node]:
                    kept = (self._places[released] for released in run.saved.get(index, ()))
                    yield Life(index, run.base, max([end, *kept]))
        born = self._places[facts.first_operation[region.start]]
        for index in self._list_states(region):
            yield Life(index, born, self._places[run.done])
            if run.stop > run.first:
                kept = (self._places[released] for released in run.saved.get(index, ()))
                yield Life(index, run.base, max([end, *kept]))
        for inner in iterate_regions(region.children):  # their checkpoints are made again
            first = facts.first_operation[inner.start]
            if first < run.stop:
                for index in self._list_states(inner):
                    yield Life(index, run.place(first), end)

    def _list_states(self, region: Region) -> list[int]:
        """What a checkpoint keeps a copy of: states, and that of the random number generator."""
        facts = self._facts
        nodes = range(region.start, region.stop)
        states = [*dict.fromkeys(index for node in nodes for index in facts.states[node])]
        if facts.random_state and any(facts.draws[region.start : region.stop]):
            states.append(facts.random_state.index)
        return states

    def _find_saved_ends(self, storage: Made, run: Run) -> Iterator[int]:
        for released in run.saved.get(storage.index, ()):
            yield self._places[released]

    def _find_input_ends(self, storage: Made, run: Run) -> Iterator[int]:
        if _is_input(storage, run.region):
            yield run.end
            yield from self._find_saved_ends(storage, run)
            for child in run.children:
                yield from self._find_input_ends(storage, child)

    def _find_local_end(self, storage: Made, depth: int, run: Run | None = None) -> int:
        """The operation of forward after which the frames let go of a storage.

        A call of a region holds its arguments until it returns, and what it returns too.
        """
        if run is not None and storage.is_output:
            return run.stop  # it is returned
        if self._facts.keeps_frames:
            return storage.local_end
        end, path = storage.local_end, self._paths[storage.node][depth:]
        for node in storage.readers:
            if run is not None and node >= run.region.stop:
                return run.stop  # it is returned
            unit = next(
                (
                    inner
                    for at, inner in enumerate(self._paths[node][depth:])
                    if at >= len(path) or path[at] is not inner
                ),
                None,
            )
            last = node if unit is None else unit.stop - 1
            end = max(end, self._facts.end_operation[last] - 1)
        return end

    def _died(self, storage: Made) -> int | None:
        return self._facts.graph.storages[storage.index].died


def _find_libraries(graph: MemoryGraph, runs: Sequence[Run]) -> Iterator[int]:
    """What libraries take for backward's thread because forward's operators run there too."""
    taken = {name for o in graph.operations if o.phase is Phase.BACKWARD for name in o.keeps}
    for run in iterate_runs(runs):
        for operation in graph.operations[run.first : run.stop]:
            for name in operation.keeps:
                if name not in taken:
                    taken.add(name)
                    yield next(s.index for s in graph.storages if s.name == name)


def _is_input(storage: Made, region: Region) -> bool:
    return storage.node < region.start and storage.comes_into(range(region.start, region.stop))


def _measure(
    facts: StepFacts, order: Sequence[tuple[int, bool]], lives: Sequence[Life]
) -> tuple[int, ...]:
    sizes = [storage.nbytes for storage in facts.storages]
    deltas = [0] * (len(order) + 1)
    live = 0
    for life in lives:
        nbytes = sizes[life.storage]
        if life.born == RESIDENT:
            live += nbytes
        else:
            deltas[life.born] += nbytes
        if life.died is not None:
            deltas[life.died + 1] -= nbytes
    deltas[0] += live
    after = accumulate(deltas[:-1])
    workspaces = (facts.graph.operations[index].workspace_bytes for index, _ in order)
    return tuple(a + b for a, b in zip(after, workspaces, strict=True))
