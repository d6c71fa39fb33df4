"""The fixture that writes a training script."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from sample_nets.scripts import MODEL, Write


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.write_text(MODEL + textwrap.dedent(text))
        return path

    return write
