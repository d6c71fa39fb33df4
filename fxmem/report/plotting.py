"""What all plots share: matplotlib where there is one, how they look, and how they are saved."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fxmem.errors import UsageError
from fxmem.graph import Category
from fxmem.report.tables import escape_controls, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, PALE, PEAK_COLOR, PLAN_COLOR = "#16191D", "#6B727C", "#B23A00", "#54206A"
STYLES = {
    Category.PARAMETER: ("#56718C", ""),
    Category.BUFFER: ("#9AA5B1", "||||"),
    Category.INPUT: ("#F0E442", "++"),
    Category.OPTIMIZER_STATE: ("#0072B2", "\\\\"),
    Category.GRADIENT: ("#009E73", "//"),
    Category.ACTIVATION: ("#E69F00", ""),
    Category.OUTPUT: ("#CC79A7", "xx"),
    Category.TEMPORARY: ("#56B4E9", "---"),
    Category.WORKSPACE: ("#D8D3C8", "||"),
}
"""Colours of Okabe and Ito, told apart with any colour vision, and hatches, in grey too; in the
order in which they are stacked, what stays at the bottom. No dots: an SVG writes out each."""
_WIDEST_TITLE = 116
_SETTINGS: dict[Any, Any] = {
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "font.size": 9.0,
    "hatch.linewidth": 0.5,
    "svg.fonttype": "none",  # text stays text, to be found and read aloud
    "svg.hashsalt": "fxmem",
    "text.parse_math": False,  # a dollar in a name is a dollar
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": PALE,
    "xtick.color": PALE,
    "ytick.color": PALE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}


def find_matplotlib() -> None:
    """Checks that plots can be drawn.

    Raises:
        UsageError: There is no matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("no matplotlib is installed", hint="pip install 'fxmem[render]'")


@contextlib.contextmanager
def plain_style() -> Iterator[None]:
    """Plots within look alike whatever the user has set up."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font does not have
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def save_figure(figure: Figure, kind: str) -> bytes:
    """A figure as a file, the same bytes each time.

    Args:
        figure: The figure.
        kind: ``svg``, ``png`` or ``pdf``.
    """
    metadata: dict[str, dict[str, str | None]] = {
        "svg": {"Date": None, "Creator": "fxmem"},
        "png": {"Software": "fxmem"},
        "pdf": {"CreationDate": None, "Creator": "fxmem", "Producer": None},
    }
    drawn = io.BytesIO()
    figure.savefig(drawn, format=kind, dpi=150, metadata=metadata[kind])
    return drawn.getvalue()


def write_title(figure: Figure, model: str, lines: list[str]) -> None:
    """The lines above a plot: the model, then the answer, then the rest.

    Args:
        figure: The figure.
        model: What was analysed.
        lines: What is under it, the answer first.
    """
    height = figure.get_figheight()
    rows = [(model, 12, "bold", INK), (lines[0], 10, "normal", PEAK_COLOR)]
    rows += [(line, 8, "normal", PALE) for line in lines[1:]]
    top = height - 0.28
    for text, size, weight, color in rows:
        width = _WIDEST_TITLE * 8 // size
        short = shorten(escape_controls(text), width)
        figure.text(
            0.12 / figure.get_figwidth(),
            top / height,
            short,
            size=size,
            weight=weight,
            color=color,
            va="center",
        )
        top -= 0.21


def choose_unit(nbytes: int) -> tuple[int, str]:
    """A unit in which an axis up to so many bytes has short numbers.

    >>> choose_unit(3 * 2**30), choose_unit(5_000)
    ((1073741824, 'GiB'), (1024, 'KiB'))
    """
    names = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = min(max(nbytes.bit_length() - 1, 0) // 10, len(names) - 1)
    return 1024**power, names[power]
