"""The programs that draw a graph in DOT."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sysconfig

from fxmem.errors import UsageError
from fxmem.report.tables import measure_width

TIME_LIMIT_S = 120
_PURE, _PURE_FORMATS = "graphviz-pure", ("svg", "png")
_HINT = "pip install graphviz-pure, or write the graph itself: -o FILE.dot"

_FONTS = "Arial, Liberation Sans, Helvetica, sans-serif"
_ARIAL = {
    **dict.fromkeys("ijl'", 0.222),
    **dict.fromkeys(" !,./:;I[\\]ft", 0.278),
    **dict.fromkeys("()-`r{}", 0.333),
    **dict.fromkeys("Jcksvxyz", 0.5),
    **dict.fromkeys("+<=>~", 0.584),
    **dict.fromkeys("FTZ", 0.611),
    **dict.fromkeys("&ABEKPSVXY", 0.667),
    **dict.fromkeys("CDHNRUw", 0.722),
    **dict.fromkeys("GOQ", 0.778),
    **dict.fromkeys("Mm", 0.833),
    "|": 0.26,
    '"': 0.355,
    "*": 0.389,
    "^": 0.469,
    "%": 0.889,
    "W": 0.944,
    "@": 1.015,
}
"""Widths of letters in the font that Graphviz lays out with, in em; those not named, 0.556."""
_SVG_TEXT = re.compile(
    r'<text(?P<look>[^>]* font-size="(?P<size>[\d.]+)"[^>]*)>(?P<text>[^<]*)</text>'
)
_SVG_FRAMES = re.compile(r'<g id="[^"]*" class="(?:cluster|edge)">.*?</g>', re.DOTALL)
_HALO = 'paint-order="stroke" stroke="#F4F6F9" stroke-width="3" stroke-linejoin="round"'


def draw_dot(dot: str, kind: str) -> bytes:
    """Draws a graph in DOT as ``svg``, ``png`` or ``pdf``; refuses where no engine can."""
    engine = find_engine(kind)
    try:
        result = subprocess.run(
            [engine, f"-T{kind}"], input=dot.encode(), capture_output=True, timeout=TIME_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"Graphviz did not lay out the graph within {TIME_LIMIT_S} seconds",
            hint="draw less of it: --depth 2",
        ) from None
    if result.returncode or not result.stdout:
        lines = result.stderr.decode("utf-8", "replace").strip().splitlines()
        cause = lines[-1] if lines else f"exit code {result.returncode}"
        raise UsageError(f"{engine} fails: {cause}", hint="write the graph itself: -o FILE.dot")
    return raise_texts(fit_texts(result.stdout)) if kind == "svg" else result.stdout


def find_engine(kind: str) -> str:
    """Finds the program that draws a format: the system's dot, else graphviz-pure."""
    found, hint = shutil.which("dot"), "apt install graphviz, or draw an .svg"
    if found is None and kind in _PURE_FORMATS:
        # It lies beside Python, which need not be on the path where its environment is not active.
        beside = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
        found, hint = shutil.which(_PURE, path=beside), _HINT
    if found is None:
        raise UsageError(f"no Graphviz that draws {kind} is installed", hint=hint)
    return found


def fit_texts(svg: bytes) -> bytes:
    """Gives the texts of an SVG the lengths that Graphviz laid them out with.

    A viewer without Arial takes another font, whose letters may be wider than the box.
    """

    def fit(match: re.Match[str]) -> str:
        text = html.unescape(match["text"]).replace("\xa0", " ")
        em = sum(_ARIAL.get(c, 0.556) if c.isascii() else 0.556 * measure_width(c) for c in text)
        length = f'textLength="{em * float(match["size"]):.2f}" lengthAdjust="spacingAndGlyphs"'
        return f"<text{match['look']} {length}>{match['text']}</text>" if em else match[0]

    drawn = _SVG_TEXT.sub(fit, svg.decode())
    return drawn.replace('font-family="Arial"', f'font-family="{_FONTS}"').encode()


def raise_texts(svg: bytes) -> bytes:
    """Puts titles of frames and texts of arrows above all arrows, which may run through them."""
    raised: list[str] = []

    def take(match: re.Match[str]) -> str:
        raised.extend(text[0] for text in _SVG_TEXT.finditer(match[0]))
        return _SVG_TEXT.sub("", match[0])

    drawn = _SVG_FRAMES.sub(take, svg.decode())
    halo = f"<g {_HALO}>\n{chr(10).join(raised)}\n</g>\n"
    body, end, rest = drawn.rpartition("</g>\n</svg>")
    return f"{body}{halo if raised else ''}{end}{rest}".encode()
