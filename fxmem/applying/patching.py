"""A plan as changes to the user's own code: what can be written there, and what cannot."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fxmem.applying.call_sites import CallSite, CallSites
from fxmem.applying.editing import SourceFile
from fxmem.graph import Node, SourceLocation
from fxmem.planning.inplace.forms import COMMUTATIVE, FormKind, read_form
from fxmem.planning.plan import DelPoint, InplaceChange, Plan, Segment

_FUNCTIONS = {"torch": torch, "F": torch.nn.functional}
"""What holds functions, by the names that code has for it."""


@dataclass(frozen=True, slots=True)
class PatchedFile:
    """A file before and after.

    Attributes:
        path: Its name.
        before: Its text.
        after: Its text with the changes.
    """

    path: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Patches:
    """What of a plan can be written as changes of code.

    Attributes:
        files: Those that change, in order of their names.
        left_out: What else the plan changes, a line for each that says why it is not in them.
    """

    files: tuple[PatchedFile, ...]
    left_out: tuple[str, ...]


def patch_sources(plan: Plan, nodes: Sequence[Node], sources: Mapping[str, str]) -> Patches:
    """Writes a plan into the code that it was made for.

    A segment is written where it is the call of one module, and that line of code calls no module
    that the plan leaves alone; a change in place, where every node of its line changes likewise.
    Batch normalisations are left out: ``torch.utils.checkpoint`` updates their statistics twice.

    Args:
        plan: The plan.
        nodes: Those of the step that it was made for.
        sources: The text of each file that may change, by the name that source locations have.
    """
    files = dict(_parse_files(sources))
    left_out = [
        *_write_segments(plan.segments, CallSites(nodes, files), files),
        *_write_inplace(plan.inplace, nodes, files),
        *_write_dels(plan.dels, files),
    ]
    patched = []
    for path, file in sorted(files.items()):
        try:
            after = file.apply_edits()
        except SyntaxError:  # such as an import on the line of one from __future__
            left_out.append(f"all of {path}: its code is written in an unusual way")
            continue
        if after != file.text:
            patched.append(PatchedFile(path, file.text, after))
    return Patches(tuple(patched), tuple(filter(None, left_out)))


def _parse_files(sources: Mapping[str, str]) -> Iterator[tuple[str, SourceFile]]:
    for path, text in sources.items():
        try:
            yield path, SourceFile(path, text)
        except (SyntaxError, ValueError):  # code that a tool translates before Python sees it
            continue


def _write_segments(
    segments: Sequence[Segment], sites: CallSites, files: Mapping[str, SourceFile]
) -> Iterator[str]:
    """Writes segments; for each an empty text, or why it is left out."""
    reasons: dict[int, str] = {}
    found: dict[int, CallSite] = {}
    flat = [*_iterate_segments(segments, None)]
    for segment, _ in flat:
        site = sites.find_site(segment.fqn) if segment.fqn else None
        if not segment.fqn:
            reasons[id(segment)] = "it is not the call of one module"
        elif segment.norms:
            reasons[id(segment)] = "its batch normalisations would update their statistics twice"
        elif segment.states:
            reasons[id(segment)] = f"it would change {segment.states[0]} twice"
        elif site is None:
            reasons[id(segment)] = "its call was not found, or more than one"
        else:
            found[id(segment)] = site
    before = -1
    while before != len(reasons):  # what is left out may leave out others
        before = len(reasons)
        kept = {segment.fqn for segment, _ in flat if id(segment) not in reasons}
        for segment, parent in flat:
            if id(segment) in reasons:
                continue
            others = sorted(found[id(segment)].modules - kept)
            if others:
                reasons[id(segment)] = f"the same line calls {others[0]}, which is to stay"
            elif parent is not None and id(parent) in reasons:
                reasons[id(segment)] = "what it lies in is left out"
    wrapped: set[ast.Call] = set()
    for segment, _ in flat:
        reason = reasons.get(id(segment), "")
        if not reason:
            site = found[id(segment)]
            if site.call not in wrapped and not files[site.path].wrap_call(site.call):
                reason = "its call is written in an unusual way"
            wrapped.add(site.call)
        name = segment.fqn or segment.first
        if not segment.fqn and segment.first != segment.last:
            name = f"{segment.first} .. {segment.last}"
        yield _explain(f"compute {name} again", segment.source, reason)


def _iterate_segments(
    segments: Iterable[Segment], parent: Segment | None
) -> Iterator[tuple[Segment, Segment | None]]:
    for segment in segments:
        yield segment, parent
        yield from _iterate_segments(segment.children, segment)


def _write_inplace(
    changes: Sequence[InplaceChange], nodes: Sequence[Node], files: Mapping[str, SourceFile]
) -> Iterator[str]:
    changed = {(change.node, change.call) for change in changes}
    by_name = {node.name: node for node in nodes}
    done: dict[tuple[SourceLocation, str], str] = {}
    for change in changes:
        reason = "it has no line in this folder"
        if change.source is not None and change.source.file in files:
            target = by_name[change.node].target
            others = [
                node.name
                for node in nodes
                if (node.source, node.target) == (change.source, target)
                and (node.name, change.call) not in changed
            ]
            key = (change.source, change.call)
            if others:
                reason = f"the same line computes {others[0]}, which is to stay"
            else:
                if key not in done:
                    done[key] = _change_call(files[change.source.file], change)
                reason = done[key]
        yield _explain(f"compute {change.node} by {change.call}", change.source, reason)


def _change_call(file: SourceFile, change: InplaceChange) -> str:
    """Changes the call of a line; returns why it cannot, or an empty text."""
    assert change.source is not None
    form = read_form(change.call)
    name = form.name
    calls = [
        node
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Call)
        and node.lineno <= change.source.line <= (node.end_lineno or 0)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == name.removesuffix("_")
    ]
    # Which of two values a sum would overwrite, the code does not tell.
    if len(calls) != 1 or name in COMMUTATIVE or form.kind is FormKind.MODULE_METHOD:
        return "its line has no single call to change"
    (call,) = calls
    func = call.func
    assert isinstance(func, ast.Attribute)
    holder = _FUNCTIONS.get(func.value.id) if isinstance(func.value, ast.Name) else None
    if form.kind is not FormKind.METHOD:
        is_written = form.kind is FormKind.FUNCTION and holder is torch.nn.functional
        is_new = all(keyword.arg != "inplace" for keyword in call.keywords)
        if is_written and is_new and file.add_argument(call, "inplace=True"):
            return ""
    elif call.keywords or (holder is not None and not hasattr(holder, name)):
        return "there is no such function, or not with these arguments"
    elif file.rename_call(call, name):
        return ""
    return "its call is written in an unusual way"


def _write_dels(dels: Sequence[DelPoint], files: Mapping[str, SourceFile]) -> Iterator[str]:
    done: dict[tuple[SourceLocation, str], str] = {}
    for point in dels:
        reason = "it has no line in this folder"
        if not point.variable.isidentifier():
            reason = "no variable of its own holds it"
        elif point.source is not None and point.source.file in files:
            key = (point.source, point.variable)
            if key not in done:
                done[key] = _delete_variable(files[point.source.file], point)
            reason = done[key]
        yield _explain(f"del {point.variable or point.value}", point.source, reason)


def _delete_variable(file: SourceFile, point: DelPoint) -> str:
    """Adds ``del`` after a line; returns why it cannot, or an empty text."""
    assert point.source is not None
    around = [n for n in ast.walk(file.tree) if _spans(n, point.source.line)]
    functions = [n for n in around if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    statements = [n for n in around if isinstance(n, ast.stmt) and not hasattr(n, "body")]
    if not functions or len(statements) != 1 or isinstance(statements[0], ast.Return | ast.Raise):
        return "nothing can follow its line"
    statement, function = statements[0], functions[-1]
    stored = any(isinstance(n.ctx, ast.Store) for n in _list_names(statement, point.variable))
    is_captured = any(
        _list_names(inner, point.variable)
        for inner in ast.walk(function)
        if inner is not function and isinstance(inner, ast.FunctionDef | ast.Lambda)
    )
    if stored or is_captured or _is_read_later(function, statement, point.variable):
        return "its variable is used again"
    if not file.add_statement(statement, f"del {point.variable}"):
        return "nothing can follow its line"
    return ""


def _is_read_later(owner: ast.AST, statement: ast.stmt, variable: str) -> bool:
    """Whether code after a statement, or before it in a loop's next round, may read a variable.

    Args:
        owner: What the statement lies in, at any depth: a function at first.
        statement: It.
        variable: The variable, which the statement may read but does not store.
    """
    fields = ("body", "handlers", "orelse", "finalbody")
    blocks = [getattr(owner, field, []) for field in fields]
    for number, block in enumerate(blocks):
        for index, part in enumerate(block):
            if not any(node is statement for node in ast.walk(part)):
                continue
            if part is not statement and _is_read_later(part, statement, variable):
                return True
            after = block[index + 1 :]
            if not isinstance(owner, ast.If):  # whose other branch does not run
                after += [other for later in blocks[number + 1 :] for other in later]
            if isinstance(owner, ast.For | ast.While):
                test = owner.test if isinstance(owner, ast.While) else None
                after += [*([test] if test else ()), *block[: index + 1]]
            return _reads_first(after, variable)
    return False


def _reads_first(statements: Iterable[ast.AST], variable: str) -> bool:
    """Whether statements, one after the other, may read a variable before they store it."""
    for statement in statements:
        contexts = {type(name.ctx) for name in _list_names(statement, variable)}
        if ast.Load in contexts or (contexts and isinstance(statement, ast.AugAssign)):
            return True
        if contexts and isinstance(statement, ast.Assign | ast.AnnAssign):
            return False
    return False


def _list_names(code: ast.AST, variable: str) -> list[ast.Name]:
    return [n for n in ast.walk(code) if isinstance(n, ast.Name) and n.id == variable]


def _spans(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    return first is not None and last is not None and first <= line <= last


def _explain(what: str, source: SourceLocation | None, reason: str) -> str:
    return f"{what}{f' ({source})' if source else ''}: {reason}" if reason else ""
