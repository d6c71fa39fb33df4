from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from fxmem.errors import UsageError
from fxmem.report import engines
from fxmem.report.engines import draw_dot, find_engine

DOT = "digraph { a -> b }"


@pytest.fixture
def hide_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Only what is put into the folder is found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(engines.sysconfig, "get_path", lambda _: str(tmp_path))
    return tmp_path


def put_program(folder: Path, name: str, code: str) -> str:
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{code}\n")
    path.chmod(0o755)
    return str(path)


def test_svg_and_png_are_drawn() -> None:
    assert b"<svg" in draw_dot(DOT, "svg")
    assert draw_dot(DOT, "png").startswith(b"\x89PNG")


@pytest.mark.skipif(shutil.which("dot") is None, reason="the extra's engine has no PDF")
def test_the_systems_graphviz_draws_pdf() -> None:
    assert draw_dot(DOT, "pdf").startswith(b"%PDF")


def test_the_extra_lies_beside_python_and_comes_before_the_systems(hide_engines: Path) -> None:
    dot = put_program(hide_engines, "dot", "")
    assert find_engine("svg") == find_engine("pdf") == dot
    pure = put_program(hide_engines, "graphviz-pure", "")
    assert (find_engine("svg"), find_engine("png"), find_engine("pdf")) == (pure, pure, dot)


@pytest.mark.usefixtures("hide_engines")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "svg",
            "no Graphviz that draws svg is installed (pip install 'fxmem[render]', or write the "
            "graph itself: -o FILE.dot)",
        ),
        (
            "pdf",
            "no Graphviz that draws pdf is installed (install it, e.g. apt install graphviz; or "
            "draw an .svg with pip's fxmem[render])",
        ),
    ],
)
def test_without_graphviz_the_error_says_what_to_install(kind: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        draw_dot(DOT, kind)
    assert str(caught.value) == message


def test_an_engine_that_fails_is_told_in_its_own_words(hide_engines: Path) -> None:
    path = put_program(
        hide_engines, "graphviz-pure", "import sys; print('out of ink', file=sys.stderr); exit(3)"
    )
    with pytest.raises(UsageError) as caught:
        draw_dot(DOT, "svg")
    assert str(caught.value) == (f"{path} fails: out of ink (write the graph itself: -o FILE.dot)")


def test_an_engine_that_fails_silently_is_told_by_its_exit_code(hide_engines: Path) -> None:
    path = put_program(hide_engines, "graphviz-pure", "exit(3)")
    with pytest.raises(UsageError) as caught:
        draw_dot(DOT, "svg")
    assert caught.value.cause == f"{path} fails: it ended with 3"


def test_an_engine_that_cannot_be_started_is_told(hide_engines: Path) -> None:
    path = hide_engines / "graphviz-pure"
    path.write_text("no program")
    path.chmod(0o755)
    with pytest.raises(UsageError) as caught:
        draw_dot(DOT, "svg")
    assert caught.value.cause == f"{path} does not start: Exec format error"


def test_an_engine_that_takes_too_long_is_stopped(
    hide_engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_program(hide_engines, "graphviz-pure", "import time; time.sleep(60)")
    monkeypatch.setattr(engines, "TIME_LIMIT_S", 0.1)
    with pytest.raises(UsageError) as caught:
        draw_dot(DOT, "svg")
    assert str(caught.value) == (
        "Graphviz did not place the graph within 0.1 seconds (draw less of it: --depth 2)"
    )
