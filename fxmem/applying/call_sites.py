"""Where in the user's code a module is called, found by its name and the lines of its parent."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fxmem.applying.editing import SourceFile
from fxmem.graph import Node


@dataclass(frozen=True, slots=True)
class Caller:
    """A class whose code calls modules: its file, and where it begins there."""

    path: str
    line: int


@dataclass(frozen=True, slots=True, eq=False)
class CallSite:
    """A call in the user's code.

    Attributes:
        path: The file.
        call: It.
        modules: The fqns of all modules that it calls.
    """

    path: str
    call: ast.Call
    modules: frozenset[str]


class CallSites:
    """The calls of the modules of a model.

    Args:
        nodes: Those of the traced model.
        files: The code that may be looked at.
    """

    def __init__(self, nodes: Sequence[Node], files: Mapping[str, SourceFile]) -> None:
        self._files = files
        self._modules = {fqn for node in nodes for fqn in iterate_prefixes(node.fqn)}
        self._classes = {
            Caller(path, statement.lineno): statement
            for path, file in files.items()
            for statement in ast.walk(file.tree)
            if isinstance(statement, ast.ClassDef)
        }
        self._callers = self._find_callers(nodes)

    def find_site(self, fqn: str) -> CallSite | None:
        """The only call of a module; None where there is not exactly one."""
        sites = [
            site
            for parent, caller in self._callers.items()
            if fqn.startswith(f"{parent}." if parent else "")
            for site in self._iterate_sites(caller, fqn[len(parent) + bool(parent) :])
        ]
        return sites[0] if len(sites) == 1 else None

    def _find_callers(self, nodes: Sequence[Node]) -> dict[str, Caller]:
        """By the fqn of a module, the class whose code runs in it, where there is one."""
        lines: dict[str, set[tuple[str, int]]] = {}
        for node in nodes:
            if node.source is not None and node.source.file in self._files:
                place = (node.source.file, node.source.line)
                lines.setdefault(_find_calling_module(node), set()).add(place)
        callers = {}
        for fqn, places in lines.items():
            parents = [p for p in iterate_prefixes(fqn) if p != fqn]
            # What only holds modules, and runs none of the user's code, has its parent's lines.
            if any(places & lines.get(parent, set()) for parent in parents):
                continue
            found = {self._find_class(*place) for place in places}
            caller = found.pop()
            if not found and caller is not None:
                callers[fqn] = caller
        return callers

    def _find_class(self, path: str, line: int) -> Caller | None:
        around = [
            caller
            for caller, statement in self._classes.items()
            if caller.path == path and caller.line <= line <= (statement.end_lineno or 0)
        ]
        return max(around, key=lambda caller: caller.line, default=None)

    def _iterate_sites(self, caller: Caller, name: str) -> Iterator[CallSite]:
        """The calls of a module in a class, which has it under a name such as ``blocks.0``."""
        code = self._classes[caller]
        parents = [fqn for fqn, other in self._callers.items() if other == caller]
        for node in ast.walk(code):
            if isinstance(node, ast.Call) and _read_name(node.func) == name:
                called = {join_names(parent, name) for parent in parents}
                yield CallSite(caller.path, node, frozenset(called & self._modules))
        container, _, _ = name.rpartition(".")
        if not container:
            return
        for call in _iterate_calls_in_loops(code, container):
            within = [f"{join_names(parent, container)}." for parent in parents]
            called = {
                fqn
                for fqn in self._modules
                for start in within
                if fqn.startswith(start) and "." not in fqn[len(start) :]
            }
            yield CallSite(caller.path, call, frozenset(called))


def iterate_prefixes(fqn: str) -> Iterator[str]:
    """A name and those of the modules around it, the model's own, which is empty, last.

    >>> [*iterate_prefixes("a.b")]
    ['a.b', 'a', '']
    """
    while fqn:
        yield fqn
        fqn = fqn.rpartition(".")[0]
    yield ""


def join_names(parent: str, name: str) -> str:
    """The fqn of a module by that of its parent."""
    return f"{parent}.{name}" if parent else name


def _find_calling_module(node: Node) -> str:
    """The module whose code has the line of a node."""
    if node.op != "call_module":
        return node.fqn
    parent, _, name = node.fqn.rpartition(".")
    return parent.rpartition(".")[0] if name.isdigit() else parent


def _read_name(expression: ast.expr) -> str:
    """What ``self.blocks[0].norm`` is called below its class: ``blocks.0.norm``; else empty."""
    parts: list[str] = []
    while not isinstance(expression, ast.Name):
        if isinstance(expression, ast.Attribute):
            parts.append(expression.attr)
        elif isinstance(expression, ast.Subscript) and isinstance(expression.slice, ast.Constant):
            parts.append(str(expression.slice.value))
        else:
            return ""
        expression = expression.value
    return ".".join(reversed(parts)) if expression.id == "self" else ""


def _iterate_calls_in_loops(code: ast.AST, container: str) -> Iterator[ast.Call]:
    """Calls of the modules of a container, each in a loop over all of it."""
    for loop in ast.walk(code):
        if not isinstance(loop, ast.For):
            continue
        for name, values in _pair_targets(loop):
            names = [n for s in loop.body for n in ast.walk(s) if isinstance(n, ast.Name)]
            if _read_name(values) != container or any(
                n.id == name and not isinstance(n.ctx, ast.Load) for n in names
            ):
                continue
            for node in (n for s in loop.body for n in ast.walk(s)):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id == name
                ):
                    yield node


def _pair_targets(loop: ast.For) -> Iterator[tuple[str, ast.expr]]:
    """The variables of a loop with what each runs over."""
    values: list[ast.expr] = [loop.iter]
    targets = [loop.target]
    call = loop.iter
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
        if not isinstance(loop.target, ast.Tuple):
            return
        targets = loop.target.elts
        if call.func.id == "zip":
            values = call.args
        elif call.func.id == "enumerate" and call.args:
            targets, values = targets[1:], call.args[:1]
        else:
            return
    for target, value in zip(targets, values, strict=False):
        if isinstance(target, ast.Name):
            yield target.id, value
