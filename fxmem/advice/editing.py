"""Changes to a recorded step, and the peak that they leave."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from math import prod
from operator import attrgetter
from typing import Any

from fxmem.analysis import Analysis
from fxmem.finding import Finding
from fxmem.graph import RESIDENT, Category, Operation, Phase, SourceLocation, Storage
from fxmem.memory.timeline import build_timeline

FORWARD = (Phase.FORWARD, Phase.LOSS)
CAST = "aten._to_copy.default"
_BETWEEN = ("_to_copy", "clone", "mul", "div", "add", "sub", "masked_fill", "where", "tanh")
MATMULS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default")


class StepEdit:
    """The storages and operations of an analysed step, to be changed.

    Sizes are the allocator's blocks. Of several micro-batches the last counts, which is traced:
    there the gradients of the others exist already.
    """

    def __init__(self, analysis: Analysis) -> None:
        self.graph, self._peak_bytes = analysis.allocated_graph, analysis.peak_bytes
        self.nodes = self.graph.nodes
        self.storages = [*self.graph.storages]
        self.operations = [*self.graph.operations]

    def change(self, index: int, **fields: Any) -> None:
        """Changes fields of a storage."""
        self.storages[index] = replace(self.storages[index], **fields)

    def keep(self, index: int, until: int) -> None:
        """Makes a storage live at least until an operation."""
        died = self.storages[index].died
        if died is not None and died < until:
            self.change(index, died=until)

    def add(self, nbytes: int, born: int, died: int) -> None:
        """Adds a storage."""
        values = (nbytes, Category.TEMPORARY, "", (), "", born, died)
        self.storages.append(Storage(len(self.storages), *values))

    def clear_workspace(self, index: int) -> None:
        """Makes an operation take no memory beside its results."""
        self.operations[index] = replace(self.operations[index], workspace_bytes=0, blocks=())

    def measure_peak(self) -> int:
        """Measures the peak of the changed step."""
        traced = (o.index for o in self.operations if o.node is not None and o.phase in FORWARD)
        changed = replace(
            self.graph, storages=tuple(self.storages), operations=tuple(self.operations)
        )
        return max(build_timeline(changed).profile()[min(traced, default=0) :])

    def make_finding(
        self, code: str, change: str, option: str, cost: str, source: SourceLocation | None = None
    ) -> Finding:
        """Makes the finding whose effect is that of all changes."""
        peak_bytes = self.measure_peak()
        saving_bytes = self._peak_bytes - peak_bytes
        return Finding(code, change, option, peak_bytes, saving_bytes, cost, source)

    # -- questions to the step as it was recorded --------------------------------------------------

    @cached_property
    def readers(self) -> dict[int, list[Operation]]:
        """The operations that read or change a storage, by its index."""
        readers: dict[int, list[Operation]] = {}
        for operation in self.graph.operations:
            for index in {*operation.reads, *operation.writes}:
                readers.setdefault(index, []).append(operation)
        return readers

    @cached_property
    def made(self) -> dict[int, list[Storage]]:
        """The storages that an operation makes, by its index."""
        made: dict[int, list[Storage]] = {}
        for storage in self.graph.storages:
            made.setdefault(storage.born, []).append(storage)
        return made

    def find_maker(self, storage: Storage) -> Operation | None:
        """Finds the operation of forward that made a storage."""
        if storage.born == RESIDENT or self.graph.operations[storage.born].phase not in FORWARD:
            return None
        return self.graph.operations[storage.born]

    @cached_property
    def _runs(self) -> dict[tuple[int | None, bool], list[Operation]]:
        runs: dict[tuple[int | None, bool], list[Operation]] = {}
        for operation in self.graph.operations:
            is_forward = operation.phase in FORWARD
            if is_forward or operation.phase is Phase.BACKWARD:
                runs.setdefault((operation.node, is_forward), []).append(operation)
        return runs

    def list_forward(self, nodes: Collection[int | None]) -> list[Operation]:
        """Lists the operations of nodes in forward and loss, in order."""
        found = (operation for node in nodes for operation in self._runs.get((node, True), ()))
        return sorted(found, key=attrgetter("index"))

    def list_backward(self, nodes: Collection[int | None]) -> list[Operation]:
        """Lists the operations in the backward of nodes, in order."""
        found = (operation for node in nodes for operation in self._runs.get((node, False), ()))
        return sorted(found, key=attrgetter("index"))

    def trace_back(self, storage: Storage) -> tuple[Operation, list[Operation]] | None:
        """Finds the matrix product behind a storage of its size, and the operations between.

        Between lie casts, scales, masks, caps by a hyperbolic tangent and shifts by a token. None
        where there is no such product.
        """
        size, between = prod(storage.shape), list[Operation]()
        while (maker := self.find_maker(storage)) is not None and maker.node is not None:
            if maker.name in MATMULS:
                return maker, between
            if maker.name.removeprefix("aten.").partition(".")[0] not in _BETWEEN:
                break
            between.append(maker)
            before = [self.graph.storages[index] for index in maker.reads]
            if not before:
                break
            storage = max(before, key=lambda s: (prod(s.shape), s.born))
            if not 0.9 <= prod(storage.shape) / max(size, 1) <= 1.1:
                break
        return None

    def follow(self, product: Operation, size: float) -> tuple[list[Storage], list[Operation]]:
        """Finds what forward makes of a product that has so many elements at least, and where.

        Returns:
            The storages, and all operations that read one of them, in order.
        """
        family = self.list_results(product, size)
        operations = {product.index: product}
        for storage in family:  # grows: what is computed of the product, and then of that
            for operation in self.readers.get(storage.index, ()):
                if operation.phase in FORWARD and operation.index not in operations:
                    operations[operation.index] = operation
                    family += self.list_results(operation, size)
        return family, [operations[index] for index in sorted(operations)]

    def list_results(self, operation: Operation, size: float) -> list[Storage]:
        """Lists what an operation makes of so many elements at least, but for its workspace."""
        made = (s for s in self.made.get(operation.index, ()) if prod(s.shape) >= size)
        return [storage for storage in made if storage.category is not Category.WORKSPACE]

    def fuse(
        self,
        nodes: Collection[int],
        kept_bytes: int,
        *,
        keeps_inputs: bool = True,
        keeps_results: bool = True,
    ) -> None:
        """Makes nodes run as one kernel, in forward as in backward.

        Storages that are made and used inside are gone; so many bytes of statistics are kept for
        backward, with inputs and results or one of them. Gradients are allocated as it begins.
        """
        forward, backward = self.list_forward(nodes), self.list_backward(nodes)
        if not forward:
            return
        ends = [run[-1].index for run in (forward, backward) if run]
        first, last = forward[0].index, ends[-1]
        for run in filter(None, (forward, backward)):
            inside = {operation.index for operation in run}
            for operation in run:
                self.clear_workspace(operation.index)
                for storage in self.made.get(operation.index, ()):
                    used = self.readers.get(storage.index, ())
                    is_result = storage.died is None or any(
                        o.index not in inside and (o.phase in FORWARD or run is backward)
                        for o in used
                    )
                    if not is_result:
                        self.change(storage.index, nbytes=0)
                    elif run is backward:
                        self.change(storage.index, born=run[0].index)
                    elif keeps_results:
                        self.keep(storage.index, last)
        inputs = {index for operation in forward for index in operation.reads}
        for storage in (self.graph.storages[index] for index in inputs if keeps_inputs):
            if storage.born < first:
                self.keep(storage.index, last)
        if backward:
            self.add(kept_bytes, first, last)


def reads_parameter(edit: StepEdit, operation: Operation) -> bool:
    """Returns whether an operation reads a parameter, or the cast of a parameter."""
    for storage in (edit.graph.storages[index] for index in operation.reads):
        maker = edit.find_maker(storage)
        origins = maker.reads if maker and maker.name == CAST else (storage.index,)
        if any(edit.graph.storages[i].category is Category.PARAMETER for i in origins):
            return True
    return False
