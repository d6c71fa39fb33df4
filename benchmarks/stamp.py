"""From what, when and how a page of results was made."""

from __future__ import annotations

import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch


def write_stamp(command: str) -> str:
    """Returns a sentence with the command, the commit, the date and torch's version."""
    return f"`{command}` at {write_time()}, torch {torch.__version__}, on the CPU."


def write_time() -> str:
    """Returns the commit and the date."""
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    today = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    return f"{commit}, {today}"


def put_page(page: str, path: Path | None) -> None:
    """Writes a page to a file; without one, prints it."""
    if path is None:
        print(page)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
