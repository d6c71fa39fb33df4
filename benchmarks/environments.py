"""Environments of the supported releases of torch, with libraries of their time.

Each holds the last patch of a release, and takes 5 GB, 3 of them to download. It is deleted when it
has been used, unless the variable FXMEM_ENVIRONMENTS names a folder to keep it in; what is there is
not installed again. In the first patch of a release, of which the wheel of torch alone is
downloaded, the private names are looked up that fxmem relies on.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

FOLDER_VARIABLE = "FXMEM_ENVIRONMENTS"
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Environment:
    """A release of torch, and what is installed beside it.

    Attributes:
        release: Major and minor number, as in ``2.6``.
        month: In which it came out; figures published later were measured with it or an older one.
        torch: Version of its last patch.
        packages: Libraries of models, with the versions of that time.
    """

    release: str
    month: str
    torch: str
    packages: tuple[str, ...]

    @property
    def first(self) -> str:
        """Version of its first patch."""
        return f"{self.release}.0"


def _describe(release: str, month: str, torch: str, vision: str, hf: str, timm: str) -> Environment:
    names = (f"torchvision=={vision}", f"transformers=={hf}", f"timm=={timm}")
    return Environment(release, month, torch, names)


ENVIRONMENTS = [
    _describe("2.6", "2025-01", "2.6.0", "0.21.0", "4.49.0", "1.0.15"),
    _describe("2.7", "2025-04", "2.7.1", "0.22.1", "4.53.3", "1.0.16"),
    _describe("2.8", "2025-08", "2.8.0", "0.23.0", "4.55.4", "1.0.19"),
    _describe("2.9", "2025-10", "2.9.1", "0.24.1", "4.57.1", "1.0.20"),
    _describe("2.10", "2026-01", "2.10.0", "0.25.0", "4.57.6", "1.0.24"),
    _describe("2.11", "2026-03", "2.11.0", "0.26.0", "5.3.0", "1.0.25"),
    _describe("2.12", "2026-05", "2.12.1", "0.27.1", "5.23.0", "1.0.31"),
    _describe("2.13", "2026-07", "2.13.0", "0.28.0", "5.23.0", "1.0.31"),
    _describe("2.14", "2026-09", "2.14.1", "0.29.1", "5.23.0", "1.0.31"),
]


@contextmanager
def open_folder() -> Iterator[Path]:
    """Opens the folder of environments; a temporary one is deleted at the end."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        yield Path(named)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def prepare_environment(environment: Environment, folder: Path) -> Path:
    """Installs an environment unless it is there, and returns its Python."""
    if environment.torch == torch.__version__.split("+")[0]:
        return Path(sys.executable)
    home = folder / f"torch-{environment.torch}"
    python, done = home / "bin" / "python", home / "complete"
    if not done.exists():
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        needed = importlib.metadata.requires("fxmem") or []
        own = [entry for entry in needed if "extra ==" not in entry and "torch" not in entry]
        _install(python, f"torch=={environment.torch}", *environment.packages, *own)
        done.touch()
        print(f"{home}: {time.perf_counter() - start:.0f} s to install", file=sys.stderr)
    return python


def _install(python: Path, *arguments: str) -> None:
    options = ["--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    subprocess.run([str(python), "-m", "pip", "install", *options, *arguments], check=True)


def look_up_in_first(python: Path, environment: Environment) -> tuple[str, ...]:
    """Looks up the private names in a release's first patch; returns what is wrong with any.

    Its wheel finds CUDA's libraries beside itself: those of the environment, which is of the last
    patch.
    """
    if environment.torch == environment.first:
        return ()
    with tempfile.TemporaryDirectory() as folder:
        (site,) = python.parents[1].glob("lib/python*/site-packages")
        alone = ["--no-deps"] if (site / "nvidia").exists() else []  # a build for the CPU has none
        _install(python, *alone, "--target", folder, f"torch=={environment.first}")
        for path in site.iterdir():
            if not Path(folder, path.name).exists():
                Path(folder, path.name).symlink_to(path)
        code = "import json, benchmarks.versions as v; print(json.dumps(v.look_up_names()))"
        found = subprocess.run(
            [str(python), "-c", code],
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"},
            stdout=subprocess.PIPE,
            text=True,
        )
    return tuple(json.loads(found.stdout)[1])
