"""Warnings at the line of the user's that called the model."""

from __future__ import annotations

import sys
import warnings

import torch

from fxmem.errors import FxmemWarning

_OURS = ("torch", "fxmem")
_GENERATED = "<eval_with_key>"
"""The file name of code that torch.fx generates."""


def warn_caller(message: str) -> None:
    """Warns with an :class:`FxmemWarning` at the innermost line of the user's."""
    if torch.compiler.is_compiling():  # which cannot follow frames
        warnings.warn(message, FxmemWarning, stacklevel=2)
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_globals.get("__name__", "").split(".")[0] in _OURS
        or frame.f_code.co_filename.startswith(_GENERATED)
    ):
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        FxmemWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__", ""),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )
