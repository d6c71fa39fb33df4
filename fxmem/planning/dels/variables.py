"""Variables of the user's code that hold a value, and the statements that read them last."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fxmem.graph import SourceLocation

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
class Statement:
    """A simple statement.

    Attributes:
        first: Its first line.
        last: Its last.
        calls: For each call in it, the names in the callee: ``self`` and ``block`` of
            ``self.block(x)``, the last one first; none where the callee is computed.
        target: The variable that it assigns; empty where that is none, or more.
        is_discarded: Whether nothing is done with what it computes: ``x.relu_()``.
    """

    first: int
    last: int
    calls: tuple[tuple[str, ...], ...]
    target: str
    is_discarded: bool

    def __contains__(self, line: int) -> bool:
        return self.first <= line <= self.last


@dataclass(frozen=True, slots=True)
class Variable:
    """A local variable that holds a value until its function returns.

    Attributes:
        name: Its name.
        last: The last statement that reads it, after which it can be deleted.
    """

    name: str
    last: Statement


@dataclass(frozen=True, slots=True)
class _Part:
    """A simple statement, or what a compound one evaluates first, and the loops around it."""

    code: ast.AST
    loops: tuple[ast.AST, ...]

    @property
    def first(self) -> int:
        return int(self.code.lineno)  # type: ignore[attr-defined]

    @property
    def last(self) -> int:
        return int(self.code.end_lineno)  # type: ignore[attr-defined]

    @property
    def target(self) -> str:
        """The only name that it assigns; empty where there is none."""
        target: object = None
        if isinstance(self.code, ast.Assign) and len(self.code.targets) == 1:
            target = self.code.targets[0]
        elif isinstance(self.code, (ast.AugAssign, ast.AnnAssign)):
            target = self.code.target
        return target.id if isinstance(target, ast.Name) else ""

    def list_names(self, name: str) -> list[ast.Name]:
        return [n for n in ast.walk(self.code) if isinstance(n, ast.Name) and n.id == name]

    def stores(self, name: str) -> bool:
        return any(not isinstance(n.ctx, ast.Load) for n in self.list_names(name))

    def loads(self, name: str) -> bool:
        if isinstance(self.code, ast.AugAssign) and self.stores(name):
            return True
        return any(isinstance(n.ctx, ast.Load) for n in self.list_names(name))

    def describe(self) -> Statement:
        calls = tuple(_list_names(c.func) for c in ast.walk(self.code) if isinstance(c, ast.Call))
        is_discarded = isinstance(self.code, ast.Expr)
        return Statement(self.first, self.last, calls, self.target, is_discarded)


@lru_cache(maxsize=4096)
def find_variable(source: SourceLocation) -> Variable | None:
    """Finds the local variable that a line assigns, where it can be deleted after its last read.

    Returns:
        None where the file cannot be read, where the line assigns no single name, and where a
        ``del`` would fail or free nothing: the value may have another holder (a container, an
        attribute, a second name, a closure), it is read by what assigns the name anew, by a
        ``return`` or in the loop's next round.
    """
    function = _find_function(source.file, source.function, source.line)
    if function is None:
        return None
    parts = [*_iterate_parts(function.body, ())]
    assigned = _find_part(parts, source.line)
    if assigned is None or not assigned.target or _is_shared(function, parts, assigned.target):
        return None
    name = assigned.target
    later = [part for part in parts if part.first > assigned.last]
    again = next((part for part in later if part.stores(name)), None)
    reading = [part for part in later if part.loads(name)]
    if again is not None:
        reading = [part for part in reading if part.first <= again.first]
    if any(p.loads(name) for p in parts if p.first <= assigned.last and p.loops and assigned.loops):
        return None  # the loop's next round reads it, or may
    last = reading[-1] if reading else assigned
    if last is again or last.loops != assigned.loops or not isinstance(last.code, ast.stmt):
        return None
    if isinstance(last.code, ast.Return) or (again and isinstance(again.code, ast.Delete)):
        return None
    return Variable(name, last.describe())


@lru_cache(maxsize=4096)
def find_statement(source: SourceLocation) -> Statement | None:
    """Finds the statement that a line is part of.

    Returns:
        None where the file cannot be read, and where the line has several statements.
    """
    function = _find_function(source.file, source.function, source.line)
    part = function and _find_part([*_iterate_parts(function.body, ())], source.line)
    return part.describe() if part else None


def is_same_function(source: SourceLocation, other: SourceLocation | None) -> bool:
    """Tells whether two lines are in one function; None is in none."""
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


def _iterate_parts(body: Sequence[ast.AST], loops: tuple[ast.AST, ...]) -> Iterator[_Part]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if not hasattr(node, "body") or isinstance(node, ast.expr):
            yield _Part(node, loops)
            continue
        is_loop = isinstance(node, (ast.For, ast.AsyncFor, ast.While))
        inside = (*loops, node) if is_loop else loops
        for child in ast.iter_child_nodes(node):
            is_block = hasattr(child, "body") and not isinstance(child, ast.expr)
            if isinstance(child, ast.stmt) or is_block:
                yield from _iterate_parts([child], inside)
            elif isinstance(child, ast.withitem):
                for value in filter(None, (child.context_expr, child.optional_vars)):
                    yield _Part(value, inside)
            elif hasattr(child, "lineno"):
                yield _Part(child, inside)


def _find_part(parts: Sequence[_Part], line: int) -> _Part | None:
    found = [part for part in parts if part.first <= line <= part.last]
    return found[0] if len(found) == 1 else None  # else the line does not tell which


def _is_shared(function: _Function, parts: Sequence[_Part], name: str) -> bool:
    """Tells whether something else than this name may hold its value, or see the name."""
    for node in ast.walk(function):
        if isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names:
            return True
        is_inner = isinstance(node, _SCOPES) and node is not function
        if is_inner and any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node)):
            return True
    for part in parts:
        if isinstance(part.code, ast.Return) or not part.loads(name):
            continue
        if isinstance(part.code, ast.Name):
            return True
        parents = {child: p for p in ast.walk(part.code) for child in ast.iter_child_nodes(p)}
        for use in part.list_names(name):
            if isinstance(use.ctx, ast.Load) and not _is_only_read(use, parents):
                return True
    return False


def _is_only_read(use: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    parent = parents.get(use)
    if isinstance(parent, ast.Call):
        called = _list_names(parent.func)
        # A class keeps what it is made of.
        keeps = called and (called[0] in _KEEPERS or called[0][0].isupper())
        return use is parent.func or not keeps
    if isinstance(parent, (ast.List, ast.Tuple)):
        return isinstance(parents.get(parent), ast.Call) and _is_only_read(parent, parents)
    if isinstance(parent, ast.keyword):
        return _is_only_read(parent, parents)
    return isinstance(parent, _READERS)


def _list_names(called: ast.AST) -> tuple[str, ...]:
    """Lists the names in a callee, the last one first; none where it is computed."""
    names: list[str] = []
    while isinstance(called, (ast.Attribute, ast.Subscript)):
        if isinstance(called, ast.Attribute):
            names.append(called.attr)
        called = called.value
    return (*names, called.id) if isinstance(called, ast.Name) else tuple(names)
