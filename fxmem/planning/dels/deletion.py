"""Values that the user's own code holds longer than it needs them, and the step without that.

A storage that autograd keeps is passed over: no ``del`` frees it before backward does.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fxmem.graph import Category, MemoryGraph, Node, Operation, Phase, SourceLocation
from fxmem.memory.timeline import build_timeline, measure_fall
from fxmem.planning.dels.variables import (
    Statement,
    find_last_read,
    find_statement,
    is_same_function,
)
from fxmem.planning.model.index import Activation, StepIndex, build_index
from fxmem.planning.plan import DelPoint


@dataclass(frozen=True, slots=True)
class _Deletion:
    """A storage that nothing uses for a while before it dies, and the point where it could go."""

    nbytes: int
    end: int  # the operation after which it could go
    died: int  # the one after which it is freed, the step's last if none
    point: DelPoint


def find_deletions(step: StepIndex) -> tuple[DelPoint, ...]:
    """Finds values that forward holds past their last use; what lowers the peak most comes first.

    Where the source says which local variable holds a value, and that a ``del`` frees it, the
    point is after the statement that reads the variable last. Other values (an argument of a
    call that runs, an element of a list, an output that nothing reads) have no variable; they
    are listed where the peak would be lower if they went after their last use. A line that runs
    often, in a loop or in a module of which there are many, is one point, with its first value.
    """
    live_bytes = build_timeline(step.graph).profile()
    points = []
    for changes in _find_changes(step):
        point = next(iter(changes.values())).point
        gone = ((c.nbytes, c.end + 1, c.died) for c in changes.values())
        saving_bytes = measure_fall(live_bytes, gone)
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


def _find_changes(step: StepIndex) -> list[dict[int, _Deletion]]:
    """Finds storages that could go earlier, grouped by the ``del`` that frees them."""
    graph, variables = step.graph, _Variables(step)
    last: dict[int, Operation] = {}
    for operation in graph.operations:
        last |= dict.fromkeys((*operation.reads, *operation.writes), operation)
    has_loss = any(operation.phase is Phase.BACKWARD for operation in graph.operations)
    found: dict[object, dict[int, _Deletion]] = {}
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
        name, source, after = "", graph.nodes[user].source, user
        held = None if made.is_output else variables.find(made, user)
        if held is not None and step.end_operation[held[2]] <= died:  # else it goes anyway
            name, source, after = held
        point = DelPoint(maker.name, name, graph.nodes[after].name, source)
        change = _Deletion(made.nbytes, step.end_operation[after] - 1, died, point)
        found.setdefault((name, source) if name else made.index, {})[made.index] = change
    return [*found.values()]


class _Variables:
    """The variables that hold values, from the recording and the source together."""

    def __init__(self, step: StepIndex) -> None:
        self._nodes = step.graph.nodes[: step.nodes]
        self._sharing: dict[int, list[Node]] = {}  # by storage, the nodes whose results share it
        self._consumers: dict[int, list[Node]] = {}  # by node, the nodes that take its result
        for node in step.graph.nodes:
            for storage in node.results:
                self._sharing.setdefault(storage, []).append(node)
            for index in node.inputs:
                self._consumers.setdefault(index, []).append(node)

    def find(self, made: Activation, user: int) -> tuple[str, SourceLocation, int] | None:
        """Finds the variable that alone holds a storage after its last user.

        All that share the storage, and its last user, have to be in the function that made it.

        Returns:
            Its name, the last line of the statement that reads it last, and that statement's
            last node.
        """
        maker = self._nodes[made.node]
        frame, targets = maker.source, set()
        if frame is None:
            return None
        assigned = frame
        for node in self._sharing[made.index]:
            statement = find_statement(node.source) if node.source else None
            if statement is None or not is_same_function(frame, node.source):
                return None
            consumers = self._consumers.get(node.index, ())
            # A view that the statement itself uses up, or the result of ``x.relu_()``.
            is_used_up = isinstance(statement.code, ast.Expr) or (
                consumers and all(_is_in(statement, frame, consumer) for consumer in consumers)
            )
            if node is maker or not is_used_up:
                targets.add(statement.target)
                assigned = node.source or frame
        last = find_last_read(assigned)
        if last is None or len(targets) != 1 or not _is_in(last, frame, self._nodes[user]):
            return None
        inside = [node for node in self._nodes if _is_in(last, frame, node)]
        known = {name for node in inside for name in (node.target, *node.fqn.split("."))}
        end = user
        for node in self._nodes[user + 1 :]:
            # Nodes of functions that the statement calls are not told from later ones by source.
            is_known = last.callees <= known or is_same_function(frame, node.source)
            if is_known and not _is_in(last, frame, node):
                break
            end = node.index
        line = last.code.end_lineno or frame.line
        return targets.pop(), replace(frame, line=line), end


def _is_in(statement: Statement, frame: SourceLocation, node: Node) -> bool:
    """Returns whether a node belongs to a statement of a function."""
    return (
        node.source is not None
        and node.source.line in statement
        and is_same_function(frame, node.source)
    )
