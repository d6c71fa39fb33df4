"""The example package of stand-ins, as ``pip`` installs it, in commands of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT

PLUGIN = ROOT / "examples" / "library_plugin"
BLOCK = 512


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With the package, and the metadata by which its entry point is found."""
    written = (PLUGIN / "pyproject.toml").read_text()
    section = '[project.entry-points."fxmem.plugins"]\nlibraries = "fxmem_libraries:register"\n'
    assert section in written
    info = tmp_path / "site" / "fxmem_libraries-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fxmem-libraries\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        section.translate({ord(c): None for c in "\"'"}).replace("project.entry-points.", "")
    )
    paths = [str(tmp_path / "site"), str(PLUGIN), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run(folder: Path, environment: dict[str, str], code: str) -> Any:
    script = folder / "train.py"
    script.write_text(code)
    command = [sys.executable, "-m", "fxmem", "run", "--json", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


GRAPH = """
import torch
from torch_scatter import scatter
nodes = torch.randn(1000, 64, device="cuda", requires_grad=True)
index = torch.randint(0, 100, (1000,), device="cuda")
optimizer = torch.optim.SGD([nodes], lr=0.1)
for _ in range(2):
    pooled = scatter(nodes, index, dim=0, dim_size=100, reduce={reduce!r})
    pooled.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_torch_scatter(tmp_path: Path, environment: dict[str, str]) -> None:
    reports = {
        reduce: run(tmp_path, environment, GRAPH.format(reduce=reduce))
        for reduce in ("sum", "mean", "max")
    }
    for report in reports.values():
        notes = report["script"]["notes"]
        assert "torch_scatter is not installed: fxmem's stand-in for torch_scatter 2.1.2 ran." in (
            notes
        )
    # The places of maxima, of 8 bytes each, are kept for backward.
    saved = {name: report["saved_bytes"] for name, report in reports.items()}
    assert saved["max"] - saved["sum"] >= 100 * 64 * 8


NORM = """
import torch
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedAdam
norm = FusedLayerNorm(1024).cuda().half()
optimizer = FusedAdam(norm.parameters())
for _ in range(3):
    norm(torch.randn(64, 1024, device="cuda", dtype=torch.float16)).sum().backward()
    optimizer.step()
"""


def test_apex(tmp_path: Path, environment: dict[str, str]) -> None:
    report = run(tmp_path, environment, NORM)
    # Two states in float for a weight and a bias in half.
    assert report["optimizer_state_bytes"] == 2 * 2 * 1024 * 4
