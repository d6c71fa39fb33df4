"""Values that the user's own code holds longer than it needs them, and the step without that.

A storage that autograd keeps is passed over: no ``del`` frees it before backward does.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from fxmem.graph import Category, MemoryGraph, Node, Operation, Phase, SourceLocation
from fxmem.memory.timeline import build_timeline, measure_fall
from fxmem.planning.model.index import Activation, StepIndex, build_index
from fxmem.planning.plan import DelPoint

_KEEPERS = frozenset(
    """
    add append appendleft dict extend extendleft insert list partial put register_buffer
    register_hook set setattr setdefault tuple update
    """.split()
)
"""Calls that store what they are given."""

_SCOPES = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
_READERS = (ast.Attribute, ast.Subscript, ast.BinOp, ast.UnaryOp, ast.Compare, ast.AugAssign)
"""Expressions that make something new of a value: they do not become a second holder."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


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
        graph, storages=tuple(replace(s, died=died.get(s.index, s.died)) for s in graph.storages)
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
            statement = _find_statement(node.source) if node.source else None
            if statement is None or not _is_same_function(frame, node.source):
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
        callees = {_name_callee(n.func) for n in ast.walk(last.code) if isinstance(n, ast.Call)}
        for node in self._nodes[user + 1 :]:
            # Nodes of functions that the statement calls are not told from later ones by source.
            is_known = callees <= known or _is_same_function(frame, node.source)
            if is_known and not _is_in(last, frame, node):
                break
            end = node.index
        line = last.code.end_lineno or frame.line
        return targets.pop(), replace(frame, line=line), end


def _is_in(statement: _Statement, frame: SourceLocation, node: Node) -> bool:
    """Returns whether a node belongs to a statement of a function."""
    return (
        node.source is not None
        and node.source.line in statement
        and _is_same_function(frame, node.source)
    )


@dataclass(frozen=True, slots=True)
class _Statement:
    """A simple statement of a function."""

    code: ast.stmt
    rest: Sequence[ast.stmt]  # the statements after, also of the blocks around, to a loop's end
    is_looped: bool

    def __contains__(self, line: int) -> bool:
        return self.code.lineno <= line <= (self.code.end_lineno or 0)

    @property
    def target(self) -> str:
        """The only name that it assigns; empty where there is none."""
        target: object = None
        if isinstance(self.code, ast.Assign) and len(self.code.targets) == 1:
            target = self.code.targets[0]
        elif isinstance(self.code, ast.AugAssign | ast.AnnAssign):
            target = self.code.target
        return target.id if isinstance(target, ast.Name) else ""


@lru_cache(maxsize=4096)
def _find_statement(source: SourceLocation) -> _Statement | None:
    """Finds the only simple statement that a line is part of, if the file can be read."""
    owner: ast.AST | None = _find_function(source.file, source.function, source.line)
    rest: list[ast.stmt] = []
    is_looped = False
    while owner is not None:
        if isinstance(owner, ast.For | ast.AsyncFor | ast.While):
            rest, is_looped = [], True
        if hasattr(owner, "finalbody"):  # which may read a value whatever happens
            return None
        blocks = [getattr(owner, name, []) for name in ("body", "orelse")]
        found = [
            (code, block[at + 1 :])
            for block in blocks
            for at, code in enumerate(block)
            if code.lineno <= source.line <= code.end_lineno
        ]
        if len(found) != 1:
            return None
        owner, following = found[0]
        rest = [*following, *rest]
        if not hasattr(owner, "body"):
            return _Statement(owner, rest, is_looped) if isinstance(owner, ast.stmt) else None
    return None


@lru_cache(maxsize=4096)
def find_last_read(source: SourceLocation) -> _Statement | None:
    """Finds the statement that reads last what a line assigns to a local variable.

    Returns:
        None where the line assigns no single name, and where a ``del`` after the statement would
        fail or free nothing: the value may have another holder (a container, an attribute, a
        second name, a closure), it is read after the loop or in the next round, in a nested block,
        by what assigns the name anew or by a ``return``.
    """
    function = _find_function(source.file, source.function, source.line)
    assigned = _find_statement(source)
    if function is None or assigned is None or not assigned.target:
        return None
    name = assigned.target
    if _is_shared(function, name):
        return None
    uses = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == name]
    if assigned.is_looped and any(
        n.lineno <= assigned.code.lineno and isinstance(n.ctx, ast.Load) for n in uses
    ):
        return None
    last = assigned
    for at, code in enumerate(assigned.rest):
        inside = {type(n.ctx) for n in ast.walk(code) if n in uses}
        if inside & {ast.Store, ast.Del}:  # another value of that name, or none
            return None if ast.Load in inside or ast.Del in inside else last
        if inside:
            last = _Statement(code, assigned.rest[at + 1 :], assigned.is_looped)
            if hasattr(code, "body") or isinstance(code, ast.Return):
                return None
    end = (assigned.rest[-1] if assigned.rest else assigned.code).end_lineno or 0
    return None if any(n.lineno > end for n in uses) else last


def _is_same_function(source: SourceLocation, other: SourceLocation | None) -> bool:
    """Returns whether two lines are in one function; None is in no function."""
    if other is None or (source.file, source.function) != (other.file, other.function):
        return False
    function = _find_function(source.file, source.function, source.line)
    return function is _find_function(other.file, other.function, other.line)


@lru_cache(maxsize=64)
def _list_functions(file: str) -> tuple[_Function, ...]:
    try:
        module = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    return tuple(n for n in ast.walk(module) if isinstance(n, _Function))


@lru_cache(maxsize=4096)
def _find_function(file: str, name: str, line: int) -> _Function | None:
    """Finds the innermost function around a line, if it is the one with that name."""
    around = [f for f in _list_functions(file) if f.lineno <= line <= (f.end_lineno or 0)]
    innermost = max(around, key=lambda function: function.lineno, default=None)
    return innermost if innermost is not None and innermost.name == name else None


def _is_shared(function: _Function, name: str) -> bool:
    """Returns whether something else than this name may hold its value, or see the name."""
    parents: dict[ast.AST, ast.AST] = {}
    returned: set[ast.AST] = set()
    for node in ast.walk(function):
        parents |= dict.fromkeys(ast.iter_child_nodes(node), node)
        if isinstance(node, ast.Global | ast.Nonlocal) and name in node.names:
            return True
        if isinstance(node, ast.Return):
            returned.update(ast.walk(node))
        is_inner = isinstance(node, _SCOPES) and node is not function
        if is_inner and any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node)):
            return True
    uses = (n for n in parents if isinstance(n, ast.Name) and n.id == name and n not in returned)
    return any(isinstance(n.ctx, ast.Load) and not _is_only_read(n, parents) for n in uses)


def _is_only_read(use: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> bool:
    parent = parents.get(use)
    if isinstance(parent, ast.Call):
        called = _name_callee(parent.func)
        # A class keeps what it is made of.
        return use is parent.func or not (called in _KEEPERS or called[:1].isupper())
    if isinstance(parent, ast.List | ast.Tuple):
        return isinstance(parents.get(parent), ast.Call) and _is_only_read(parent, parents)
    if isinstance(parent, ast.keyword):
        return _is_only_read(parent, parents)
    return isinstance(parent, _READERS)


def _name_callee(called: ast.AST) -> str:
    if isinstance(called, ast.Attribute):
        return called.attr
    return called.id if isinstance(called, ast.Name) else ""
