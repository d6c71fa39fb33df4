"""Values that the user's own code holds longer than it needs them, and the step without that.

A storage that autograd keeps is passed over: nothing the user deletes frees it before backward
does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fxmem.graph import Category, MemoryGraph, Node, Operation, Phase, SourceLocation
from fxmem.memory.timeline import build_timeline
from fxmem.planning.dels.variables import (
    Statement,
    Variable,
    find_statement,
    find_variable,
    is_same_function,
)
from fxmem.planning.model.index import Activation, StepIndex, build_index
from fxmem.planning.model.peaks import PeakMeter
from fxmem.planning.plan import DelPoint


@dataclass(frozen=True, slots=True)
class _Change:
    """A storage that nothing uses for a while before it dies, and the point where it could go.

    Attributes:
        nbytes: Its size.
        end: The operation after which it could go.
        died: The operation after which it is freed, the step's last if none.
        point: The point; that of the first change where several are one line of code.
    """

    nbytes: int
    end: int
    died: int
    point: DelPoint


def find_deletions(step: StepIndex) -> tuple[DelPoint, ...]:
    """Finds values that forward holds past their last use, though backward does not need them.

    Where the source says which local variable holds a value, and that a ``del`` frees it, the
    point is after the statement that reads the variable last. Other values (an argument of a
    call that runs, an element of a list, an output that nothing reads) have no variable; they
    are named where the peak would be lower if they went after their last use. A line that runs
    often, in a loop or in a module of which there are many, is one point, with its first value.

    Returns:
        The point that lowers the peak most comes first.
    """
    meter = PeakMeter(build_timeline(step.graph).profile())
    points = []
    for changes in _find_changes(step):
        point = next(iter(changes.values())).point
        saving_bytes = meter.measure_fall((c.nbytes, c.end + 1, c.died) for c in changes.values())
        if point.variable or saving_bytes:
            points.append(replace(point, saving_bytes=saving_bytes))
    return tuple(sorted(points, key=lambda point: -point.saving_bytes))


def apply_deletions(graph: MemoryGraph, points: Iterable[DelPoint]) -> MemoryGraph:
    """Deletes values in the step that they were found in."""
    chosen = {replace(point, saving_bytes=0) for point in points}
    died = {
        storage: change.end
        for changes in _find_changes(build_index(graph))
        if next(iter(changes.values())).point in chosen
        for storage, change in changes.items()
    }
    return replace(
        graph,
        storages=tuple(replace(s, died=died.get(s.index, s.died)) for s in graph.storages),
    )


def _find_changes(step: StepIndex) -> list[dict[int, _Change]]:
    """Finds storages that could go earlier; those that one ``del`` frees lie together."""
    graph, holders = step.graph, _Holders(step)
    last: dict[int, Operation] = {}
    for operation in graph.operations:
        last |= dict.fromkeys((*operation.reads, *operation.writes), operation)
    has_loss = any(operation.phase is Phase.BACKWARD for operation in graph.operations)
    found: dict[object, dict[int, _Change]] = {}
    for made in step.made:
        storage, maker = graph.storages[made.index], graph.nodes[made.node]
        used = last.get(made.index, graph.operations[made.born])
        if made.saves or made.index not in maker.results or used.phase is not Phase.FORWARD:
            continue
        died = len(graph.operations) - 1 if storage.died is None else storage.died
        if storage.died is None:
            is_idle = has_loss and storage.category is Category.OUTPUT
        else:
            is_idle = graph.operations[died].phase is Phase.FORWARD
        user = max(made.node, step.find_node(used.index))
        if not is_idle or died < step.end_operation[user]:
            continue
        after, variable = user, None if made.is_output else holders.find_variable(made, user)
        if variable is not None:
            after = holders.find_end(variable.last, made, user)
        if step.end_operation[after] > died:  # that is when it goes anyway
            after, variable = user, None
        source = graph.nodes[after].source
        if variable is not None and maker.source is not None:
            source = replace(maker.source, line=variable.last.last)
        name = variable.name if variable else ""
        point = DelPoint(maker.name, name, graph.nodes[after].name, source)
        change = _Change(made.nbytes, step.end_operation[after] - 1, died, point)
        found.setdefault((name, source) if name else made.index, {})[made.index] = change
    return [*found.values()]


class _Holders:
    """Finds the variables that hold storages, from the recording and the source together."""

    def __init__(self, step: StepIndex) -> None:
        self._nodes = step.graph.nodes[: step.nodes]
        self._sharing: dict[int, list[Node]] = {}  # by storage, the nodes whose results share it
        self._consumers: dict[int, list[Node]] = {}  # by node, those that take its result
        for node in step.graph.nodes:
            for storage in node.results:
                self._sharing.setdefault(storage, []).append(node)
            for index in node.inputs:
                self._consumers.setdefault(index, []).append(node)

    def find_variable(self, made: Activation, user: int) -> Variable | None:
        """Finds the variable that holds a storage after its last user, if nothing else does."""
        maker = self._nodes[made.node]
        frame = maker.source
        if frame is None:
            return None
        sources = [frame]
        for node in self._sharing[made.index]:
            consumers = self._consumers.get(node.index, ())
            if node is maker:
                continue
            if node.source is None or not is_same_function(frame, node.source):
                if any(is_same_function(frame, consumer.source) for consumer in consumers):
                    return None  # it was returned to the function
                continue
            statement = find_statement(node.source)
            if statement is not None and statement.is_discarded:
                continue
            # Is the result used up by the statement that it is part of?
            if not (statement and consumers) or not all(
                _is_run_by(statement, node.source, consumer) for consumer in consumers
            ):
                sources.append(node.source)
        statements = [find_statement(source) for source in sources]
        variable = find_variable(sources[-1])
        if variable is None or len({s.target if s else "" for s in statements}) != 1:
            return None
        is_last = _is_run_by(variable.last, frame, self._nodes[user])
        return variable if is_last else None

    def find_end(self, statement: Statement, made: Activation, user: int) -> int:
        """Finds the last node of the statement that reads a value last.

        Where the source does not tell a call in it from one after it, this is the later one.
        """
        frame = self._nodes[made.node].source
        assert frame is not None
        own = {n.index: n for n in self._nodes if is_same_function(frame, n.source)}
        inside = {i for i, n in own.items() if n.source and n.source.line in statement}
        words = {word for i in inside for word in (own[i].target, *own[i].fqn.split("."))}
        others = [names for names in statement.calls if not names or names[0] not in words]
        callee = None if user in own else _find_callee(statement, self._nodes[user])
        end = user
        for node in self._nodes[user + 1 :]:
            path = tuple(node.fqn.split("."))
            if node.index in own:
                if node.index not in inside:
                    break
            elif not others or (callee and len(others) == 1 and path[: len(callee)] != callee):
                break
            end = node.index
        return end


def _is_run_by(statement: Statement, frame: SourceLocation, node: Node) -> bool:
    """Tells whether a node belongs to a statement, or to what it calls, as far as names tell."""
    if is_same_function(frame, node.source):
        return node.source is not None and node.source.line in statement
    return node.source is not None and _find_callee(statement, node) is not None


def _find_callee(statement: Statement, node: Node) -> tuple[str, ...] | None:
    """Finds the path, as in fqns, to the module whose call in a statement runs a node.

    Empty for a function; None where the statement calls neither.
    """
    path = tuple(node.fqn.split("."))
    for names in statement.calls:
        if names and names[0] in path:
            return path[: path.index(names[0]) + 1]
        if names and node.source is not None and names[0] == node.source.function:
            return ()
    return None
