"""Lines of code that make a plan's changes in the user's own source."""

from __future__ import annotations

import ast
import contextlib
import copy
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fxmem.graph import Node, is_installed
from fxmem.planning.inplace.forms import COMMUTATIVE, FormKind, read_form
from fxmem.planning.model.recomputation import iterate_segments
from fxmem.planning.plan import DelPoint, InplaceChange, Plan, Segment
from fxmem.report.blocks import Listing

_CHECKPOINT = ast.parse("torch.utils.checkpoint.checkpoint", mode="eval").body
_FUNCTIONAL = ("F", "nn.functional", "torch.nn.functional")
_Trees = Mapping[str, ast.Module]
_Kind = TypeVar("_Kind", ast.ClassDef, ast.Call, ast.stmt)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A line of code for one change of a plan, or for several that share the line."""

    code: str  # a statement, without indentation
    file: str = ""  # empty for a line that goes where the model is built
    line: int = 0  # the first of the statement there, which the code replaces
    end_line: int = 0
    is_added: bool = False  # the code follows that statement, as ``del`` does
    modules: str = ""  # for which the line is, where it runs for several

    def __str__(self) -> str:
        """Writes the line with where it goes.

        >>> print(Suggestion("del y", "/home/me/net.py", 61, 62, True))
        net.py:61  del y  # after line 62
        """
        place = f"{self.file.rpartition('/')[2]}:{self.line}" if self.file else "the model"
        note = f"after line {self.end_line}" if self.is_added else ""
        note = f"for {self.modules}" if self.modules else note
        return f"{place}  {self.code}" + (f"  # {note}" if note else "")


def suggest_code(
    plan: Plan, nodes: Sequence[Node], sources: Mapping[str, str]
) -> tuple[Suggestion, ...]:
    """Finds lines of code that make a plan's changes to the nodes of a step.

    A segment has one where it is the call of one module of several operations without batch
    normalisation, whose statistics ``torch.utils.checkpoint`` would update twice; an in-place
    change, where its line makes one such call and every node of that line changes; a ``del``,
    where the variable is known. ``sources`` has the text of each file, by the name that source
    locations have.
    """
    trees = {}
    for path, text in sources.items():
        if is_installed(path):  # a package's code is not the user's to change
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the user's escape sequences, for instance
            try:
                trees[path] = ast.parse(text)
            except (SyntaxError, ValueError):  # code that a tool translates before Python sees it
                continue
    found = [
        *_suggest_checkpoints(plan.segments, nodes, trees),
        *_suggest_flags(plan.inplace, nodes),
        *_suggest_inplace(plan.inplace, nodes, trees),
        *_suggest_dels(plan.dels, trees),
    ]
    return tuple(sorted(dict.fromkeys(found), key=lambda s: (s.file, s.line, s.is_added)))


def list_suggestions(plan: Plan, nodes: Sequence[Node]) -> Listing:
    """Lists the lines of code of a plan with where they go, by the user's files as they are now."""
    sources = {}
    for path in {node.source.file for node in nodes if node.source is not None}:
        with contextlib.suppress(OSError, UnicodeDecodeError):  # such as code that was typed
            sources[path] = Path(path).read_text(encoding="utf-8")
    return Listing("In your own code:", [*map(str, suggest_code(plan, nodes, sources))])


def _suggest_checkpoints(
    segments: Iterable[Segment], nodes: Sequence[Node], trees: _Trees
) -> Iterator[Suggestion]:
    """Suggests ``checkpoint`` of modules, one line for all modules that a loop runs."""
    called = _find_module_calls(nodes, trees)
    planned: dict[tuple[str, ast.Call], list[str]] = {}
    for segment in iterate_segments(segments):
        places = [place for place, fqns in called.items() if segment.fqn in fqns]
        # Of one operation, torch.utils.checkpoint keeps the result beside the input.
        if len(places) == 1 and segment.nodes > 1 and not (segment.norms or segment.states):
            planned.setdefault(places[0], []).append(segment.fqn)
    for place, fqns in planned.items():
        path, call = place
        flag = ast.keyword("use_reentrant", ast.Constant(value=False))
        new = ast.Call(_CHECKPOINT, [call.func, *call.args], [*call.keywords, flag])
        modules = fold_names(fqns) if len(called[place]) > 1 else ""
        yield from _replace_call(path, trees[path], call, new, modules)


def _find_module_calls(
    nodes: Sequence[Node], trees: _Trees
) -> dict[tuple[str, ast.Call], set[str]]:
    """Finds the calls of modules in the user's classes, each with the fqns of what it runs."""
    classes: dict[str, tuple[str, ast.ClassDef]] = {}  # by the fqn of the module that it runs in
    children: dict[str, set[str]] = {}
    for node in nodes:
        fqn = node.fqn
        while fqn:
            children.setdefault(fqn.rpartition(".")[0], set()).add(fqn)
            fqn = fqn.rpartition(".")[0]
        if node.source is not None and node.source.file in trees:
            is_leaf = node.op == "call_module"  # whose line is its caller's; a container has none
            caller = re.sub(r"(^|\.)[^.]+(\.\d+)?$", "", node.fqn) if is_leaf else node.fqn
            around = _find_around(trees[node.source.file], node.source.line, ast.ClassDef)
            if around:
                classes.setdefault(caller, (node.source.file, around[-1]))
    modules = set().union(*children.values())
    found: dict[tuple[str, ast.Call], set[str]] = {}
    for parent, (path, code) in classes.items():
        before = f"{parent}." if parent else ""
        for part in ast.walk(code):
            if isinstance(part, ast.Call) and _read_name(part.func):
                found.setdefault((path, part), set()).add(before + _read_name(part.func))
            elif isinstance(part, ast.For):
                # The variable may be one of several: for index, block in enumerate(self.blocks).
                targets = {n.id for n in ast.walk(part.target) if isinstance(n, ast.Name)}
                names = {before + _read_name(n) for n in ast.walk(part.iter) if _read_name(n)}
                run = set().union(*(children.get(name, set()) for name in names))
                for call in (n for statement in part.body for n in ast.walk(statement)):
                    if isinstance(call, ast.Call) and getattr(call.func, "id", "") in targets:
                        found.setdefault((path, call), set()).update(run)
    return {place: fqns & modules for place, fqns in found.items()}


def _read_name(expression: ast.expr | ast.AST) -> str:
    """Reads the path below ``self``: ``blocks.0.norm`` of ``self.blocks[0].norm``, else empty."""
    if not isinstance(expression, ast.Attribute | ast.Subscript):
        return ""
    name = re.sub(r"\[(\d+)\]", r".\1", ast.unparse(expression))
    return name.removeprefix("self.") if re.fullmatch(r"self(\.\w+)+", name) else ""


def fold_names(fqns: Iterable[str]) -> str:
    """Joins names of modules; names that differ in one number become one.

    >>> fold_names(["h.0", "h.1", "h.2"]), fold_names(["h.1.mlp", "h.5.mlp", "head"])
    ('h[0:3]', 'h[1, 5].mlp, head')
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for fqn in fqns:
        match = re.fullmatch(r"(.*)\.(\d+)((?:\.[^.]*\D)*)", fqn)
        before, number, after = match.groups() if match else ("", -1, fqn)
        groups.setdefault((before, after), []).append(int(number))
    names = []
    for (before, after), numbers in groups.items():
        first, end = min(numbers), max(numbers) + 1
        is_range = len(numbers) > 1 and sorted(numbers) == [*range(first, end)]
        at = f"{first}:{end}" if is_range else ", ".join(map(str, sorted(numbers)))
        names.append(f"{before}[{at}]{after}" if before else after)
    return ", ".join(names)


def _suggest_flags(changes: Iterable[InplaceChange], nodes: Sequence[Node]) -> Iterator[Suggestion]:
    """Suggests ``inplace`` of modules, all of whose calls may run in place."""
    changed = {c.node for c in changes if read_form(c.call).kind is FormKind.MODULE}
    calls: dict[str, set[str]] = {}
    for node in nodes:
        if node.op == "call_module":
            calls.setdefault(node.fqn, set()).add(node.name)
    for fqn, names in calls.items():
        if names <= changed:
            yield Suggestion(f"model.get_submodule({fqn!r}).inplace = True")


def _suggest_inplace(
    changes: Sequence[InplaceChange], nodes: Sequence[Node], trees: _Trees
) -> Iterator[Suggestion]:
    """Suggests calls with ``inplace=True``, or as a method with an underscore."""
    changed, targets = {c.node for c in changes}, {node.name: node.target for node in nodes}
    for change in changes:
        form, source = read_form(change.call), change.source
        # Which of two values a sum would overwrite, the code does not tell.
        if form.kind not in (FormKind.METHOD, FormKind.FUNCTION) or form.name in COMMUTATIVE:
            continue
        if source is None or source.file not in trees:
            continue
        own_name = form.name.removesuffix("_")
        calls = [
            call
            for call in _find_around(trees[source.file], source.line, ast.Call)
            if own_name in (getattr(call.func, "attr", ""), getattr(call.func, "id", ""))
        ]
        same = [n.name for n in nodes if (n.source, n.target) == (source, targets[change.node])]
        if len(calls) != 1 or not changed.issuperset(same):
            continue
        func, values = calls[0].func, calls[0].args
        keywords = [keyword for keyword in calls[0].keywords if keyword.arg != "inplace"]
        holder = ast.unparse(func.value) if isinstance(func, ast.Attribute) else "F"
        if form.kind is FormKind.FUNCTION:
            if holder not in _FUNCTIONAL:
                continue
            keywords.append(ast.keyword("inplace", ast.Constant(value=True)))
        elif isinstance(func, ast.Attribute) and holder not in ("torch", *_FUNCTIONAL):
            func = ast.Attribute(func.value, form.name)
        elif values and not isinstance(values[0], ast.Starred):
            func, values = ast.Attribute(values[0], form.name), values[1:]
        else:
            continue
        new = ast.Call(func, values, keywords)
        yield from _replace_call(source.file, trees[source.file], calls[0], new)


def _replace_call(
    path: str, tree: ast.Module, call: ast.Call, new: ast.Call, modules: str = ""
) -> Iterator[Suggestion]:
    """Suggests the statement of a call with another call in its place."""
    statement = _find_statement(tree, call.lineno)
    if statement is not None:
        changed = copy.deepcopy(statement, {id(call): new})  # which takes the new call for the old
        line, end_line = statement.lineno, statement.end_lineno or statement.lineno
        yield Suggestion(ast.unparse(changed), path, line, end_line, modules=modules)


def _suggest_dels(dels: Iterable[DelPoint], trees: _Trees) -> Iterator[Suggestion]:
    """Suggests ``del`` of the variables that points name, each after the statement of its point."""
    for point in dels:
        if point.variable and point.source is not None and point.source.file in trees:
            statement = _find_statement(trees[point.source.file], point.source.line)
            if statement is not None:
                lines = statement.lineno, statement.end_lineno or statement.lineno
                yield Suggestion(f"del {point.variable}", point.source.file, *lines, is_added=True)


def _find_statement(tree: ast.Module, line: int) -> ast.stmt | None:
    """Finds the statement on a line; None for the head of a block, and for several."""
    around = _find_around(tree, line, ast.stmt)
    simple = [n for n in around if not (hasattr(n, "body") or hasattr(n, "cases"))]
    if len(simple) != 1 or any(n.lineno == simple[0].lineno for n in around if n is not simple[0]):
        return None
    return simple[0]


def _find_around(tree: ast.AST, line: int, kind: type[_Kind]) -> list[_Kind]:
    """Finds the parts of code of a kind that span a line, outer ones first."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, kind) and node.lineno <= line <= (node.end_lineno or 0)
    ]
