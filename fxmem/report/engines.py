"""Graphviz, wherever it is: the extra ``fxmem[render]``, or the one of the system."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig

from fxmem.errors import UsageError

_PURE = "graphviz-pure"
_PURE_FORMATS = ("svg", "png")
"""What that engine draws of the formats that fxmem offers; it has no PDF."""
TIME_LIMIT_S = 120


def draw_dot(dot: str, kind: str) -> bytes:
    """A picture of a graph.

    Args:
        dot: The graph.
        kind: ``svg``, ``png`` or ``pdf``.

    Raises:
        UsageError: There is no Graphviz that draws this, or it fails, or it takes too long.
    """
    engine = find_engine(kind)
    try:
        result = subprocess.run(
            [engine, f"-T{kind}"],
            input=dot.encode(),
            capture_output=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"Graphviz did not place the graph within {TIME_LIMIT_S} seconds",
            hint="draw less of it: --depth 2",
        ) from None
    except OSError as error:
        raise UsageError(f"{engine} does not start: {error.strerror}", hint=_HINT) from error
    if result.returncode or not result.stdout:
        lines = result.stderr.decode("utf-8", "replace").strip().splitlines()
        said = lines[-1] if lines else f"it ended with {result.returncode}"
        raise UsageError(f"{engine} fails: {said}", hint="write the graph itself: -o FILE.dot")
    return result.stdout


_HINT = "pip install 'fxmem[render]', or write the graph itself: -o FILE.dot"


def find_engine(kind: str) -> str:
    """The program that draws a format.

    Args:
        kind: ``svg``, ``png`` or ``pdf``.

    Raises:
        UsageError: There is none.
    """
    if kind in _PURE_FORMATS:
        # It lies beside Python, which need not be on the path where its environment is not active.
        beside = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
        found = shutil.which(_PURE, path=beside) or shutil.which("dot")
        hint = _HINT
    else:
        found = shutil.which("dot")
        hint = "install it, e.g. apt install graphviz; or draw an .svg with pip's fxmem[render]"
    if found is None:
        raise UsageError(f"no Graphviz that draws {kind} is installed", hint=hint)
    return found
