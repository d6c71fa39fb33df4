"""Variables of the user's code that hold a value, and the statements that read them last."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Mapping, Sequence
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

    @property
    def callees(self) -> set[str]:
        """The last name of each callee, ``block`` of ``self.block(x)``; empty if it has none."""
        return {_name_callee(n.func) for n in ast.walk(self.code) if isinstance(n, ast.Call)}


@lru_cache(maxsize=4096)
def find_statement(source: SourceLocation) -> Statement | None:
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
            return Statement(owner, rest, is_looped) if isinstance(owner, ast.stmt) else None
    return None


@lru_cache(maxsize=4096)
def find_last_read(source: SourceLocation) -> Statement | None:
    """Finds the statement that reads last what a line assigns to a local variable.

    Returns:
        None where the line assigns no single name, and where a ``del`` after the statement would
        fail or free nothing: the value may have another holder (a container, an attribute, a
        second name, a closure), it is read after the loop or in the next round, in a nested block,
        by what assigns the name anew or by a ``return``.
    """
    function = _find_function(source.file, source.function, source.line)
    assigned = find_statement(source)
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
            last = Statement(code, assigned.rest[at + 1 :], assigned.is_looped)
            if hasattr(code, "body") or isinstance(code, ast.Return):
                return None
    end = (assigned.rest[-1] if assigned.rest else assigned.code).end_lineno or 0
    return None if any(n.lineno > end for n in uses) else last


def is_same_function(source: SourceLocation, other: SourceLocation | None) -> bool:
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
