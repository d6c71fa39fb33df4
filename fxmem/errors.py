"""Errors and warnings of fxmem: one family, one clear line each, with what to try."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FxmemError(Exception):
    """Base of every error that fxmem raises on purpose.

    Args:
        cause: One line: what is wrong, naming the thing the user gave.
        hint: What to try, or the empty string.

    The CLI prints ``str(error)`` on one line and exits with :attr:`exit_code`.

    >>> str(FxmemError("no module named 'nets'", hint="is its folder on PYTHONPATH?"))
    "no module named 'nets' (is its folder on PYTHONPATH?)"
    """

    exit_code = 2

    def __init__(self, cause: str, hint: str = "") -> None:
        super().__init__(cause, hint)
        self.cause = " ".join(cause.split())
        self.hint = " ".join(hint.split())

    def __str__(self) -> str:
        return f"{self.cause} ({self.hint})" if self.hint else self.cause


class UsageError(FxmemError):
    """An argument that cannot be understood: a shape, a dtype, a device, an optimizer."""


class LoadError(FxmemError):
    """A TARGET that cannot be turned into an ``nn.Module``."""


class TraceError(FxmemError):
    """A model whose step cannot be run on fake tensors; names the user's own line."""


class DataDependentError(TraceError):
    """A size or a branch that depends on values, which a static analysis does not have."""


class InfeasibleError(FxmemError):
    """No plan keeps what was asked for: a finding, not a mistake."""

    exit_code = 1


def suggest_names(name: str, known: Iterable[str], otherwise: str = "", most: int = 1) -> str:
    """Writes a hint for a name that is not known: the closest that are, else another text.

    >>> suggest_names("adm", ["adam", "sgd"]), suggest_names("x", ["adam"], "use adam")
    ('did you mean adam?', 'use adam')
    """
    close = difflib.get_close_matches(name, [*known], n=most)
    return f"did you mean {' or '.join(close)}?" if close else otherwise


_BY_WORKER = "Original Traceback (most recent call last):"
"""The second line of an error of a loader's worker, of ``ExceptionWrapper`` in torch/_utils.py."""


def summarize_error(error: BaseException) -> str:
    """Writes the type and the first line of an error that is not fxmem's own, and of its cause.

    PyTorch's texts go on with backends, C++ frames or advice on debugging. A line that announces
    the next one ends with that. transformers imports lazily, and only the first cause says what
    is missing.

    >>> summarize_error(ValueError("no such width\\nframe #0: ..."))
    'ValueError: no such width'
    >>> summarize_error(RuntimeError("in loading state_dict:\\n\\tMissing keys: bias"))
    'RuntimeError: in loading state_dict: Missing keys: bias'
    """
    lines = str(error).strip().splitlines() or [""]
    if lines[1:2] == [_BY_WORKER]:
        place = lines[0].partition(" in ")[2].rstrip(".")
        lines = [f"{lines[-1].removeprefix(f'{type(error).__name__}: ')} (in {place})"]
    text = " ".join(map(str.strip, lines[:2])) if lines[0].endswith(":") else lines[0]
    if len(text) > 300:
        text = f"{text[:300].rsplit(' ', 1)[0]} ..."
    summary = f"{type(error).__name__}: {text}" if text else type(error).__name__
    cause = error
    while cause.__cause__ not in (None, cause):  # some code raises an error from itself
        cause = cause.__cause__
    first = summary if cause is error else summarize_error(cause)
    return summary if first.partition(": ")[2] in summary else f"{summary}, from {first}"


class FxmemWarning(UserWarning):
    """A part of the user's step that an analysis leaves out; one line."""
