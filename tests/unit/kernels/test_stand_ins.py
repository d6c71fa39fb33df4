"""Modules that stand for those that cannot be imported without a GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fxmem
from fxmem.kernels import stand_ins
from fxmem.scripts.recording import Recording


def scale(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Scaling:
    """A class of the package."""


@pytest.fixture
def _registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stand_ins, "_registered", {})
    before = {*sys.modules}
    yield
    assert not [name for name in {*sys.modules} - before if name.startswith("acme_")]


def record(code: str) -> tuple[Recording, dict[str, Any]]:
    """Runs code as a script is run, and a step after it."""
    space: dict[str, Any] = {}
    with fxmem.record(gpu="a100-80gb", steps=1) as recording:
        exec(code, space)
        (torch.ones(8, device="cuda", requires_grad=True) * 1).sum().backward()
    return recording, space


@pytest.mark.usefixtures("_registry")
def test_a_package_that_is_not_installed() -> None:
    names = {"scale": scale, "Scaling": Scaling}
    fxmem.register_stand_in("acme_ops.fast", names, version="1.2")
    code = """
import importlib.metadata, importlib.util
from acme_ops.fast import Scaling, scale
import acme_ops, torch
made = scale(torch.ones(8, device="cuda")).shape
version = importlib.metadata.version("acme-ops"), acme_ops.__version__
found = importlib.util.find_spec("acme_ops.slow"), importlib.metadata.packages_distributions()
"""
    recording, space = record(code)
    assert space["made"] == (8,) and space["Scaling"] is Scaling
    assert space["version"] == ("1.2", "1.2")
    assert space["found"][0] is None and space["found"][1]["acme_ops"] == ["acme_ops"]
    note = "acme_ops is not installed: fxmem's stand-in for acme_ops 1.2 ran."
    assert note in recording.notes
    assert importlib.util.find_spec("acme_ops") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("acme_ops")


@pytest.mark.usefixtures("_registry")
def test_a_package_that_is_imported_and_not_called_is_not_told() -> None:
    fxmem.register_stand_in("acme_ops", {"scale": scale}, version="1.2")
    recording, _ = record("from acme_ops import scale")
    assert not any("acme_ops" in note for note in recording.notes)


@pytest.mark.usefixtures("_registry")
def test_an_installed_package_is_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_ops.py").write_text("kind = 'installed'")
    monkeypatch.syspath_prepend(tmp_path)
    fxmem.register_stand_in("own_ops", {"kind": "stand-in"}, version="1")
    fxmem.register_stand_in("own_ops.more", {"kind": "stand-in"}, version="1")
    _, space = record("from own_ops import kind")
    assert space["kind"] == "installed"
    with pytest.raises(ModuleNotFoundError, match=r"own_ops\.more"):
        record("import own_ops.more")
    del sys.modules["own_ops"]


@pytest.mark.usefixtures("_registry")
def test_functions_of_an_installed_extension_are_replaced_within(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_cuda.py").write_text("def scale(x):\n    raise MemoryError('launched')\n")
    monkeypatch.syspath_prepend(tmp_path)
    fxmem.register_stand_in("own_cuda", {"scale": scale})
    _, space = record("import own_cuda, torch\nmade = own_cuda.scale(torch.ones(8, device='cuda'))")
    assert space["made"].shape == (8,)
    with pytest.raises(MemoryError, match="launched"):
        sys.modules["own_cuda"].scale(None)
    del sys.modules["own_cuda"]


SCRIPT = """
import torch
{code}
x = torch.ones(8, device="cuda", requires_grad=True)
x.sum().backward()
"""


def run(folder: Path, code: str) -> Any:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(code=code))
    return fxmem.run(str(script), [], gpu="a100-80gb")


@pytest.mark.usefixtures("_registry")
@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from acme_ops import other", "acme_ops.other"),
        ("import acme_ops; acme_ops.other", "acme_ops.other"),
        ("import acme_ops.other", "acme_ops.other"),
    ],
)
def test_a_name_that_a_stand_in_lacks(tmp_path: Path, code: str, name: str) -> None:
    fxmem.register_stand_in("acme_ops", {"scale": scale}, version="1.2")
    with pytest.raises(fxmem.LoadError) as caught:
        run(tmp_path, code)
    text = "script.py:3 needs {}, which fxmem's stand-in for acme_ops 1.2 does not have"
    assert str(caught.value) == text.format(name) + " (fxmem.register_stand_in)"


@pytest.mark.usefixtures("_registry")
@pytest.mark.parametrize(
    ("package", "text"),
    [
        (
            "mamba_ssm",
            "needs mamba_ssm, which is not installed (its Python is enough: MAMBA_SKIP_CUDA_BUILD="
            "TRUE MAMBA_FORCE_BUILD=TRUE pip install --no-deps --no-build-isolation mamba-ssm)",
        ),
        (
            "apex",
            "needs apex, which is not installed, and whose kernels fxmem does not know (instead:"
            " the modules and optimizers of torch.nn and torch.optim; or tell them:"
            " fxmem.register_stand_in)",
        ),
        (
            "acme_cuda",
            "imports 'acme_cuda', a compiled module that is not installed (say what its functions"
            " make: fxmem.register_stand_in('acme_cuda', ...))",
        ),
    ],
)
def test_a_package_without_a_stand_in(tmp_path: Path, package: str, text: str) -> None:
    with pytest.raises(fxmem.LoadError) as caught:
        run(tmp_path, f"import {package}")
    assert str(caught.value) == f"script.py:3 {text}"


LOADED = """
from torch.utils import cpp_extension
own = cpp_extension.load_inline("acme_twice", ["..."], cuda_sources=["..."], functions=["twice"])
other = cpp_extension.load(name="acme_twice", sources=["twice.cpp", "twice.cu"])
own.twice(torch.ones(8, device="cuda"))
"""


@pytest.mark.usefixtures("_registry")
def test_an_extension_that_is_compiled_when_it_is_imported(tmp_path: Path) -> None:
    with pytest.raises(fxmem.TraceError) as caught:
        run(tmp_path, LOADED)
    assert str(caught.value) == (
        "script.py:5 compiles the CUDA extension 'acme_twice', which cannot run here (say what its"
        " functions make: fxmem.register_stand_in('acme_twice', ...))"
    )
    fxmem.register_stand_in("acme_twice", {"twice": scale})
    assert run(tmp_path, LOADED).steps
