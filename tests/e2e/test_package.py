"""The wheel and the sdist as they would be published."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import fxmem

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(ROOT, "build", "--no-isolation", "--outdir", str(folder), ".")
    return folder


def run(folder: Path, module: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=os.environ | environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_both_are_fit_to_publish(built: Path) -> None:
    names = sorted(path.name for path in built.iterdir())
    version = fxmem.__version__
    assert names == [f"fxmem-{version}-py3-none-any.whl", f"fxmem-{version}.tar.gz"]
    run(built, "twine", "check", "--strict", *names)


def test_they_carry_what_is_not_python(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file, tarfile.open(sdist) as tar:
        contents = (file.namelist(), [name.partition("/")[2] for name in tar.getnames()])
    templates = [str(path.relative_to(ROOT)) for path in ROOT.glob("fxmem/report/templates/*")]
    for names in contents:
        assert {"fxmem/py.typed", "fxmem/advice/findings.md", *templates} <= {*names}


def test_the_wheel_runs_where_it_is_installed(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    site = tmp_path / "site"
    options = ["--quiet", "--no-deps", "--no-index", "--target", str(site)]
    run(tmp_path, "pip", "install", *options, str(wheel))
    (tmp_path / "net.py").write_text("from torch import nn\n\nNET = nn.Linear(4, 2)\n")
    target = ["net.py:NET", "--input", "8x4", "--device", "cpu", "-o", "report.html"]
    run(tmp_path, "fxmem", "render", *target, PYTHONPATH=str(site))
    assert "net.py" in (tmp_path / "report.html").read_text()
    assert "fxmem_budget(size)" in run(tmp_path, "pytest", "--markers", PYTHONPATH=str(site))
