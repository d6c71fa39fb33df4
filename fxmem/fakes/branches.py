"""Answers to tests of unknown truth values, found in the code that asks for them.

Where code looks at a value that is not known only to raise or to warn - ``assert mask.any()``, ``if
(x < 0).any(): raise`` - the answer is known all the same: an analysis is of a step that goes well.
PyTorch's own checks (the arguments of a distribution, the variances of ``gaussian_nll_loss``) are
of that kind as much as the user's. Of other tests a script takes the usual answer.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType

import torch

from fxmem.source import Span, find_span

_TORCH = os.path.dirname(torch.__file__)
_BETWEEN = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    os.path.join(_TORCH, "_tensor.py"),
    os.path.join(_TORCH, "overrides.py"),
)
"""Files between a check and the operator that it runs: fxmem, and the methods of tensors."""
_TELLING = re.compile(
    r"^(print|_?warn(ing)?(_once)?|rank_zero_(warn|info|debug))$"
    r"|(^|[._])(log|logger|logging|warnings|getLogger\(.*\))"
    r"\.(warn|warning|info|debug|error|exception|critical|log)(_once)?$"
)
"""Functions that warn or log and do nothing else, by name: a method of another may do anything."""
_TRAINING = ("backward", "step")
_BLOCKS = (ast.For, ast.While, ast.With, ast.FunctionDef)
_FINDERS = ("any", "sum", "count_nonzero")


@dataclass(frozen=True, slots=True)
class _Check:
    """A truth value that decides whether the code raises."""

    span: Span  # of its expression
    statement: Span  # around that
    passes: bool  # the answer with which the code goes on


_assumed: ContextVar[bool | None] = ContextVar("assumed", default=None)


@contextlib.contextmanager
def assume_passing(answer: bool) -> Iterator[None]:
    """Answers every check of a function in C++ alike, within, so that it passes."""
    token = _assumed.set(answer)
    try:
        yield
    finally:
        _assumed.reset(token)


def find_passing_answer(frame: FrameType | None) -> bool | None:
    """Finds what the truth value that a frame asks for must be for the code not to raise.

    Returns None where both answers let the code go on.
    """
    assumed = _assumed.get()
    return _find_answer(frame, _list_checks) if assumed is None else assumed


def find_usual_answer(frame: FrameType | None) -> bool:
    """Finds an answer for an unknown truth value: a ``while`` goes on, other tests are False.

    A test as a whole is: in ``if not found:`` something was found. But ``if not wrong.any():
    break`` ends a ``while True`` that nothing else ends: values are drawn until they are right.
    And a ``for`` goes on where the other branch would break it, and training where the other
    branch would leave it out.
    """
    return bool(_find_answer(frame, _list_tests))


def find_training_answer(frame: FrameType | None) -> bool | None:
    """Finds the answer for a test of an unknown number that lets training go on.

    A branch that alone trains is taken, and one that leaves a loop or a function before it trains
    is not, as where a policy has moved too far. Returns None for any other test.
    """
    return _find_answer(frame, _list_guards)


def _find_answer(
    frame: FrameType | None, list_checks: Callable[[str], tuple[_Check, ...]]
) -> bool | None:
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    if frame is None:
        return None
    checks = list_checks(frame.f_code.co_filename)
    here = find_span(frame.f_code, frame.f_lasti)
    if here is None:
        line = frame.f_lineno or 0
        found = [check for check in checks if check.span[0] <= line <= check.span[1]]
    else:
        # Some versions of Python say that a jump belongs to the whole statement.
        found = [check for check in checks if check.span == here]
        found = found or [check for check in checks if check.statement == here]
    answers = {check.passes for check in found}
    return answers.pop() if len(answers) == 1 else None


@functools.lru_cache(maxsize=256)
def _list_checks(filename: str) -> tuple[_Check, ...]:
    """Lists asserts, branches that end in ``raise``, and branches that only warn or log."""
    found: list[tuple[ast.stmt | ast.expr, ast.expr, bool]] = []
    for node in ast.walk(_parse(filename)):
        if isinstance(node, ast.Assert):
            found.append((node, node.test, True))
        elif isinstance(node, ast.If) and _ends_in_raise(node.body) != _ends_in_raise(node.orelse):
            found.append((node, node.test, _ends_in_raise(node.orelse)))
        elif isinstance(node, ast.FunctionDef):
            branches = (inner for inner in ast.walk(node) if isinstance(inner, ast.If))
            found += [(each, each.test, False) for each in branches if _only_tells(each, node)]
    return _make_checks(found)


@functools.lru_cache(maxsize=256)
def _list_tests(filename: str) -> tuple[_Check, ...]:
    """Lists the tests of loops and branches, each once, and others that negate."""
    found: list[tuple[ast.stmt | ast.expr, ast.expr, bool]] = []
    seen: set[ast.AST] = set()
    exits: set[ast.stmt] = set()
    goes_on: set[ast.AST] = set()
    for node in ast.walk(_parse(filename)):
        if isinstance(node, ast.For):
            goes_on.update(inner for inner in ast.walk(node) if _breaks_otherwise(inner))
        elif isinstance(node, ast.While):
            goes_on.difference_update(ast.walk(node))
        if isinstance(node, ast.While) and isinstance(node.test, ast.Constant):
            ways = [inner for inner in ast.walk(node) if isinstance(inner, ast.Break | ast.Return)]
            exits.update(ways if len(ways) == 1 else ())
        if isinstance(node, ast.While | ast.If | ast.IfExp):
            ends = isinstance(node, ast.If) and node.body[-1] in exits and _is_negated(node.test)
            passes = ends or isinstance(node, ast.While) or node in goes_on or _is_taken(node)
            found.append((node, node.test, passes))
            seen.update(ast.walk(node.test))
        elif isinstance(node, ast.expr) and _is_negated(node) and node not in seen:
            found.append((node, node, False))
            seen.update(ast.walk(node))
    return _make_checks(found)


@functools.lru_cache(maxsize=256)
def _list_guards(filename: str) -> tuple[_Check, ...]:
    """Lists the tests of branches that decide whether what follows trains."""
    found: list[tuple[ast.stmt | ast.expr, ast.expr, bool]] = []
    for node in ast.walk(_parse(filename)):
        body = node.body if isinstance(node, _BLOCKS) else []
        for place, statement in enumerate(body):
            if isinstance(statement, ast.If):
                leaves = isinstance(statement.body[-1], ast.Break | ast.Continue | ast.Return)
                if leaves and not _trains(statement.body) and _trains(body[place + 1 :]):
                    found.append((statement, statement.test, False))
        if isinstance(node, ast.If) and _trains(node.body) != _trains(node.orelse):
            found.append((node, node.test, _trains(node.body)))
    return _make_checks(found)


def _trains(body: list[ast.stmt]) -> bool:
    return any(_is_of_training(node) for statement in body for node in ast.walk(statement))


def _is_taken(node: ast.AST) -> bool:
    """Returns whether a branch is one that is taken, if nothing is peculiar.

    It alone calls ``backward`` or ``step``, behind a guard against NaN, or adds to a loss, or works
    on the elements that ``any(mask)`` finds, as nflows' splines do: ``x[mask]`` finds all.
    """
    if not isinstance(node, ast.If):
        return False
    if _trains(node.body) or _trains(node.orelse):
        return _trains(node.body) and not _trains(node.orelse)
    inside = [n for statement in node.body for n in ast.walk(statement)]
    calls = [n for n in ast.walk(node.test) if isinstance(n, ast.Call)]
    found = [n for call in calls if _name_of(call.func) in _FINDERS for n in ast.walk(call)]
    masks = {n.id for n in found if isinstance(n, ast.Name)}
    slices = [n.slice for n in inside if isinstance(n, ast.Subscript)]
    return any(isinstance(n, ast.Name) and n.id in masks for n in slices)


def _is_of_training(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr=name) if name in _TRAINING:
            return True
        case ast.AugAssign(target=ast.Name(id=name), op=ast.Add()):
            return "loss" in name.lower()
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp(op=ast.Add()) as value):
            read = (n.id for n in ast.walk(value) if isinstance(n, ast.Name))
            return "loss" in name.lower() and name in read
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append")):
            return "loss" in name.lower()
    return False


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else ""


def _breaks_otherwise(node: ast.AST) -> bool:
    """Returns whether a branch ends a loop where its test fails: an early stop, as hqq's."""
    if not isinstance(node, ast.If) or isinstance(node.body[-1], ast.Break):
        return False
    return bool(node.orelse) and isinstance(node.orelse[-1], ast.Break)


def _is_negated(test: ast.expr) -> bool:
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


def is_in_while(frame: FrameType | None) -> bool:
    """Returns whether the innermost loop that runs is a ``while``."""
    while frame is not None:
        if not frame.f_code.co_filename.startswith((_TORCH, *_BETWEEN)):
            loops = _list_loops(frame.f_code.co_filename)
            around = [
                (first, kind) for first, last, kind in loops if first <= frame.f_lineno <= last
            ]
            if around:
                return max(around)[1]
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=256)
def _list_loops(filename: str) -> tuple[tuple[int, int, bool], ...]:
    loops = (n for n in ast.walk(_parse(filename)) if isinstance(n, ast.While | ast.For))
    return tuple((*_span_of(loop)[:2], isinstance(loop, ast.While)) for loop in loops)


def _parse(filename: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):  # no Python file, or one that has changed since
        return ast.Module([], [])


def _make_checks(
    tests: Iterable[tuple[ast.stmt | ast.expr, ast.expr, bool]],
) -> tuple[_Check, ...]:
    return tuple(
        _Check(_span_of(operand), _span_of(statement), answer)
        for statement, test, passes in tests
        for operand, answer in _split_test(test, passes)
    )


def _ends_in_raise(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Raise)


def _only_tells(branch: ast.If, function: ast.FunctionDef) -> bool:
    """Returns whether a branch only warns or logs, with texts that it puts together itself.

    As transformers' ``warn_if_padding_and_no_attention_mask`` does.
    """
    inner = {*ast.walk(branch)}
    written = {n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    outer = (n for n in ast.walk(function) if n not in inner)
    if branch.orelse or any(isinstance(n, ast.Name) and n.id in written for n in outer):
        return False
    tells = False
    for node in inner:
        if isinstance(node, ast.Expr):
            call = node.value.func if isinstance(node.value, ast.Call) else node.value
            if not _TELLING.search(ast.unparse(call)):
                return False
            tells = True
        elif isinstance(node, ast.Assign | ast.AugAssign):
            calls = (n for n in ast.walk(node.value) if isinstance(n, ast.Call))
            if not all(ast.unparse(call.func) in ("getattr", "len", "str") for call in calls):
                return False
        elif isinstance(node, ast.stmt) and not isinstance(node, ast.If):
            return False
    return tells


def _split_test(test: ast.expr, passes: bool) -> Iterator[tuple[ast.expr, bool]]:
    """Splits a test into the operands whose truth is asked for: in ``a and b`` each decides."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield test, not passes  # the instruction that negates asks for its operand
        yield from _split_test(test.operand, not passes)
    elif isinstance(test, ast.BoolOp):
        for operand in test.values:
            yield from _split_test(operand, passes)
    else:
        yield test, passes
        for element in _list_alike(test, passes):
            yield from _split_test(element, passes)


def _list_alike(test: ast.expr, passes: bool) -> list[ast.expr]:
    """Lists the elements that ``all`` or ``any`` asks for, where each must have its answer.

    As in ``if not all(torch.equal(a, b) for a, b in zip(xs, ys)): raise`` of GPyTorch's ExactGP.
    """
    if not (isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and len(test.args) == 1):
        return []
    if {"all": True, "any": False}.get(test.func.id) is not passes:
        return []
    elements = test.args[0]
    if isinstance(elements, ast.GeneratorExp | ast.ListComp):
        return [elements.elt]
    return elements.elts if isinstance(elements, ast.List | ast.Tuple) else []


def _span_of(node: ast.expr | ast.stmt) -> Span:
    end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
    return node.lineno, end_line, node.col_offset, end_column
