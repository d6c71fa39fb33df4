"""Suggested lines of code written into a file, as a user would."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from fxmem.planning.suggestions import Suggestion


def write_suggestions(text: str, suggestions: Iterable[Suggestion]) -> str:
    """The text of a file with suggestions for it written at their lines."""
    lines = text.split("\n")
    for suggestion in sorted(suggestions, key=lambda s: (-s.line, not s.is_added)):
        head = lines[suggestion.line - 1]
        code = head[: len(head) - len(head.lstrip())] + suggestion.code
        start = suggestion.end_line if suggestion.is_added else suggestion.line - 1
        lines[start : suggestion.end_line] = [code]
    return "\n".join(lines)


def load_net(path: str | Path) -> nn.Module:
    """The model ``Net`` of a file as it is written now, with the same weights each time."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    net: nn.Module = module.Net()
    return net
