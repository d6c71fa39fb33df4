"""From what, when and how a page of results was made."""

from __future__ import annotations

import subprocess
from datetime import datetime, timezone

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
