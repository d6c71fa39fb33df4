"""Code that looks at a value only to raise: ``assert mask.any()``, ``if (x < 0).any(): raise``.

An analysis is of a step that goes well, so it knows what such a test must have said: an assert
holds, and a branch that ends in ``raise``, or does no more than warn, is not taken. PyTorch's own
checks (the arguments of a distribution, the variances of ``gaussian_nll_loss``) are of that kind as
much as the user's.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

import torch

from fxmem.tracing.source import Span, find_span

_TORCH = os.path.dirname(torch.__file__)
_BETWEEN = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    os.path.join(_TORCH, "_tensor.py"),
    os.path.join(_TORCH, "overrides.py"),
)
"""Where what runs the operators begins: fxmem, and the methods of tensors."""
_HARMLESS = re.compile(r"^(getattr|len|repr|str|type)$|\.(format|join)$")
_TELLING = re.compile(
    r"^(print|_?warn(ing)?(_once)?|rank_zero_(warn|info|debug))$"
    r"|(^|[._])(log|logger|logging|warnings|getLogger\(.*\))"
    r"\.(warn|warning|info|debug|error|exception|critical|log)(_once)?$"
)
"""What warns or logs and does nothing else: by names, for a method of another may do anything."""


@dataclass(frozen=True, slots=True)
class _Check:
    """A truth value that decides whether the code raises.

    Attributes:
        span: Where it is written.
        statement: Where the statement is written that asks for it.
        passes: What it is where the code goes on.
    """

    span: Span
    statement: Span
    passes: bool


_assumed: list[bool] = []


@contextlib.contextmanager
def assume_passing(answer: bool) -> Iterator[None]:
    """What every test within says for the code not to raise: of a function in C++.

    Args:
        answer: What the tests say.
    """
    _assumed.append(answer)
    try:
        yield
    finally:
        _assumed.pop()


def find_passing_answer(frame: FrameType | None) -> bool | None:
    """What the test that is being evaluated must say for the code not to raise.

    Args:
        frame: The innermost frame; those that run the operators are passed over.

    Returns:
        None where both answers let the code go on.
    """
    if _assumed:
        return _assumed[-1]
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    if frame is None:
        return None
    checks = _list_checks(frame.f_code.co_filename)
    here = find_span(frame.f_code, frame.f_lasti)
    if here is None:
        found = [check for check in checks if _is_on_line(check.span, frame.f_lineno)]
    else:
        # Some versions of Python say that a jump belongs to the whole statement.
        found = [check for check in checks if check.span == here]
        found = found or [check for check in checks if check.statement == here]
    answers = {check.passes for check in found}
    return answers.pop() if len(answers) == 1 else None


def _is_on_line(span: Span, line: int | None) -> bool:
    return line is not None and span[0] <= line <= span[1]


@functools.lru_cache(maxsize=256)
def _list_checks(filename: str) -> tuple[_Check, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):  # no Python file, or one that has changed since
        return ()
    return tuple(_iterate_checks(tree))


def _iterate_checks(tree: ast.Module) -> Iterator[_Check]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for statement in ast.walk(node):
                if isinstance(statement, ast.If) and _only_tells(statement, node):
                    for test, passes in _split_test(statement.test, False):
                        yield _Check(_span_of(test), _span_of(statement), passes)
        if isinstance(node, ast.Assert):
            tests = _split_test(node.test, True)
        elif isinstance(node, ast.If) and _ends_in_raise(node.body) != _ends_in_raise(node.orelse):
            tests = _split_test(node.test, _ends_in_raise(node.orelse))
        else:
            continue
        for test, passes in tests:
            yield _Check(_span_of(test), _span_of(node), passes)


def _ends_in_raise(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Raise)


def _only_tells(statement: ast.If, function: ast.FunctionDef) -> bool:
    """Tells whether a branch only warns or logs: nothing that it sets is read elsewhere."""
    if statement.orelse or not all(map(_is_telling, statement.body)):
        return False
    inner = {*ast.walk(statement)}
    if not any(isinstance(node, ast.Expr) for node in inner):
        return False
    names = {node.id for node in inner if isinstance(node, ast.Name) and _is_written(node)}
    return not any(
        isinstance(node, ast.Name) and node.id in names and node not in inner
        for node in ast.walk(function)
    )


def _is_written(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _is_telling(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.If):
        return all(map(_is_telling, (*statement.body, *statement.orelse)))
    if isinstance(statement, ast.Assign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        calls = (node for node in ast.walk(statement.value) if isinstance(node, ast.Call))
        is_plain = all(_HARMLESS.search(ast.unparse(call.func)) for call in calls)
        return is_plain and all(isinstance(target, ast.Name) for target in targets)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return _TELLING.search(ast.unparse(statement.value.func)) is not None
    return isinstance(statement, ast.Pass)


def _split_test(test: ast.expr, passes: bool) -> Iterator[tuple[ast.expr, bool]]:
    """The operands whose truth is asked for; in ``a and b`` and ``a or b`` each decides alike."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield test, not passes  # the instruction that negates asks for its operand
        yield from _split_test(test.operand, not passes)
    elif isinstance(test, ast.BoolOp):
        for operand in test.values:
            yield from _split_test(operand, passes)
    else:
        yield test, passes


def _span_of(node: ast.expr | ast.stmt) -> Span:
    end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
    return node.lineno, end_line, node.col_offset, end_column
