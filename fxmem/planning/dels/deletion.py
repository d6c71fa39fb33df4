"""What the user's own code holds longer than it needs it, and what the step is without that.

A storage that autograd keeps is passed over: nothing the user lets go of sets it free before
backward does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from fxmem.graph import Category, MemoryGraph, Node, Operation, Phase, SourceLocation
from fxmem.planning.dels.variables import (
    Statement,
    Variable,
    find_statement,
    find_variable,
    is_same_function,
)
from fxmem.planning.model.index import Activation, StepIndex, build_index, find_node
from fxmem.planning.model.peaks import meter_graph
from fxmem.planning.plan import DelPoint


@dataclass(frozen=True, slots=True)
class _Idle:
    """A storage that nothing uses for a while before it dies.

    Attributes:
        made: It.
        user: Index of the last node that uses it.
        died: Index of the operation after which it is freed, the step's last if none.
        is_output: Whether it is returned.
    """

    made: Activation
    user: int
    died: int
    is_output: bool


@dataclass(frozen=True, slots=True)
class _Change:
    """A storage, the operation after which it could go, and the point where it would."""

    idle: _Idle
    end: int
    point: DelPoint


def find_deletions(step: StepIndex) -> tuple[DelPoint, ...]:
    """Values that forward holds past their last use, though backward does not need them.

    Where the source says which local variable holds a value, and that a ``del`` lets it go, the
    point is after the statement that reads the variable last. Other values (an argument of a
    call that runs, an element of a list, an output that nothing reads) have no variable; they
    are named where the peak would be lower if they went after their last use. A line that runs
    often, in a loop or in a module of which there are many, is one point, with its first value.

    Args:
        step: The step as it was recorded.

    Returns:
        What lowers the peak most comes first.
    """
    meter = meter_graph(step.graph)
    points = []
    for changes in _find_changes(step):
        first = changes[0]
        saving_bytes = meter.measure_fall(
            (c.idle.made.nbytes, c.end + 1, c.idle.died) for c in changes
        )
        if first.point.variable or saving_bytes:
            points.append(replace(first.point, saving_bytes=saving_bytes))
    return tuple(sorted(points, key=lambda point: -point.saving_bytes))


def apply_deletions(graph: MemoryGraph, points: Iterable[DelPoint]) -> MemoryGraph:
    """The step in which these values are let go of.

    Args:
        graph: The step that they were found in.
        points: Of those, any number.
    """
    chosen = {replace(point, saving_bytes=0) for point in points}
    died = {
        change.idle.made.index: change.end
        for changes in _find_changes(build_index(graph))
        if changes[0].point in chosen
        for change in changes
    }
    return replace(
        graph,
        storages=tuple(replace(s, died=died.get(s.index, s.died)) for s in graph.storages),
    )


def _find_changes(step: StepIndex) -> list[list[_Change]]:
    """What could go earlier; what one ``del`` in the source lets go of lies together."""
    graph, holders = step.graph, _Holders(step)
    found: dict[object, list[_Change]] = {}
    for idle in _iterate_idle(step):
        after, variable = idle.user, holders.find_variable(idle)
        if variable is not None:
            after = holders.find_end(variable.last, idle)
        if step.end_operation[after] > idle.died:  # that is when it goes anyway
            after, variable = idle.user, None
        source = graph.nodes[after].source
        frame = graph.nodes[idle.made.node].source
        if variable is not None and frame is not None:
            source = replace(frame, line=variable.last.last)
        point = DelPoint(
            value=graph.nodes[idle.made.node].name,
            variable=variable.name if variable else "",
            after=graph.nodes[after].name,
            source=source,
        )
        key = (variable.name, source) if variable else idle
        found.setdefault(key, []).append(_Change(idle, step.end_operation[after] - 1, point))
    return [*found.values()]


def _iterate_idle(step: StepIndex) -> Iterator[_Idle]:
    graph = step.graph
    last: dict[int, Operation] = {}
    for operation in graph.operations:
        last |= dict.fromkeys((*operation.reads, *operation.writes), operation)
    has_loss = any(operation.phase is Phase.BACKWARD for operation in graph.operations)
    for made in step.made:
        storage = graph.storages[made.index]
        if made.saves or made.index not in graph.nodes[made.node].results:
            continue
        used = last.get(made.index, graph.operations[made.born])
        if used.phase is not Phase.FORWARD:
            continue
        if storage.died is not None:
            died = storage.died
            if graph.operations[died].phase is not Phase.FORWARD:
                continue
        elif has_loss and storage.category is Category.OUTPUT:
            died = len(graph.operations) - 1
        else:
            continue
        user = max(made.node, find_node(step, used.index))
        if died >= step.end_operation[user]:
            yield _Idle(made, user, died, storage.died is None)


class _Holders:
    """Finds out which variable holds a storage, from the recording and the source together."""

    def __init__(self, step: StepIndex) -> None:
        self._nodes = step.graph.nodes[: step.nodes]
        self._lying: dict[int, list[Node]] = {}  # by storage, the nodes whose results lie on it
        self._consumers: dict[int, list[Node]] = {}  # by node, those that take its result
        for node in step.graph.nodes:
            for storage in node.results:
                self._lying.setdefault(storage, []).append(node)
            for index in node.inputs:
                self._consumers.setdefault(index, []).append(node)

    def find_variable(self, idle: _Idle) -> Variable | None:
        """The variable that holds a storage after its last use, if nothing else does."""
        maker = self._nodes[idle.made.node]
        frame = maker.source
        if frame is None or idle.is_output:
            return None
        sources = [frame]
        for node in self._lying[idle.made.index]:
            if node is maker:
                continue
            if node.source is None or not is_same_function(frame, node.source):
                if any(
                    is_same_function(frame, n.source) for n in self._consumers.get(node.index, ())
                ):
                    return None  # it was returned to the function
            elif not self._is_intermediate(node, node.source):
                sources.append(node.source)
        statements = [find_statement(source) for source in sources]
        if len({s.target if s else "" for s in statements}) != 1:
            return None
        variable = find_variable(sources[-1])
        if variable is None or not _is_run_by(variable.last, frame, self._nodes[idle.user]):
            return None
        return variable

    def find_end(self, statement: Statement, idle: _Idle) -> int:
        """The last node of the statement that reads a value last.

        Where the source does not tell a call in it from one after it, this is the later one.
        """
        frame = self._nodes[idle.made.node].source
        assert frame is not None
        own = {n.index: n for n in self._nodes if is_same_function(frame, n.source)}
        inside = {i for i, n in own.items() if n.source and n.source.line in statement}
        words = {word for i in inside for word in (own[i].target, *own[i].fqn.split("."))}
        others = [names for names in statement.calls if not names or names[0] not in words]
        callee = None if idle.user in own else _find_callee(statement, self._nodes[idle.user])
        end = idle.user
        for node in self._nodes[idle.user + 1 :]:
            path = tuple(node.fqn.split("."))
            if node.index in own:
                if node.index not in inside:
                    break
            elif not others or (callee and len(others) == 1 and path[: len(callee)] != callee):
                break
            end = node.index
        return end

    def _is_intermediate(self, node: Node, source: SourceLocation) -> bool:
        """Tells whether a result is used up by the statement that it is part of."""
        statement = find_statement(source)
        consumers = self._consumers.get(node.index, ())
        if statement is None or statement.is_discarded:
            return statement is not None
        return bool(consumers) and all(_is_run_by(statement, source, taker) for taker in consumers)


def _is_run_by(statement: Statement, frame: SourceLocation, node: Node) -> bool:
    """Tells whether a node belongs to a statement, or to what it calls, as far as names tell."""
    if node.source is None:
        return False
    if is_same_function(frame, node.source):
        return node.source.line in statement
    return _find_callee(statement, node) is not None


def _find_callee(statement: Statement, node: Node) -> tuple[str, ...] | None:
    """What a statement calls that runs a node: the way to a module, as in fqns.

    Empty for a function.
    """
    path = tuple(node.fqn.split("."))
    for names in statement.calls:
        if names and names[0] in path:
            return path[: path.index(names[0]) + 1]
        if names and node.source is not None and names[0] == node.source.function:
            return ()
    return None
