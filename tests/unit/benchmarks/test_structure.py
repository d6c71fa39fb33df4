"""The project's own structure, and how it is counted."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.structure import (
    MOST_FILES,
    MOST_LINES,
    count_calls,
    count_lines,
    find_crowded_folders,
    find_long_functions,
)


def test_no_folder_is_crowded_and_no_function_is_long() -> None:
    assert find_crowded_folders() == find_long_functions() == {}


def test_an_analysis_is_followed_through_few_files_and_frames() -> None:
    # In a process of its own: other tests leave imports and registered kernels behind.
    command = [sys.executable, "-m", "benchmarks.structure", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    calls = json.loads(done.stdout)["calls"]
    assert calls["files"] <= 70
    assert calls["frames"] <= 25


def test_long_functions_and_crowded_folders_are_found(tmp_path: Path) -> None:
    package = tmp_path / "fxmem" / "memory"
    package.mkdir(parents=True)
    body = "\n".join(["    x = 1"] * (MOST_LINES - 1))
    (package / "long.py").write_text(
        f"@len\ndef short():\n{body}\n\n\ndef long():\n{body}\n    x\n"
    )
    for index in range(MOST_FILES - 1):
        (package / f"m{index}.py").touch()
    assert find_long_functions(tmp_path) == {"fxmem/memory/long.py:long": MOST_LINES + 1}
    assert find_crowded_folders(tmp_path) == {}
    (package / "one_more.py").touch()
    assert find_crowded_folders(tmp_path) == {"fxmem/memory": MOST_FILES + 1}
    assert count_lines(tmp_path) == {"fxmem": 2 * MOST_LINES + 4, "tests": 0}


def test_calls_are_counted_within_a_package(tmp_path: Path) -> None:
    for path, code in {
        "api.py": "def analyze(call, pause):\n    return pause(lambda: call([1]))\n",
        "recording/ledger.py": "def add(sizes):\n    return [count(size) for size in sizes]\n"
        "def count(size):\n    return size\n",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(code)
    api, ledger = (load(tmp_path / path) for path in ("api.py", "recording/ledger.py"))
    calls = count_calls(lambda: api.analyze(ledger.add, lambda run: run()), tmp_path)
    assert (calls.files, calls.functions, calls.calls) == (2, 4, 4)
    assert calls.stack == ("analyze", "<lambda>", "add", "count")
    assert calls.frames == 4 < calls.all_frames


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
