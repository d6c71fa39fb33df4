"""Pictures as Graphviz draws them, read again."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sysconfig
from xml.etree import ElementTree

PURE = shutil.which("graphviz-pure", path=sysconfig.get_path("scripts"))
ENGINES = [*filter(None, [shutil.which("dot"), PURE])]
SVG = "{http://www.w3.org/2000/svg}"
HARMLESS = {f"{SVG}{name}" for name in "svg g title path polygon polyline ellipse text a".split()}
"""Elements of the SVG that Graphviz writes for boxes, arrows and labels."""


@functools.lru_cache
def draw_with(engine: str, dot: str, kind: str) -> bytes:
    """Drawn by one program."""
    result = subprocess.run(
        [engine, f"-T{kind}"], input=dot.encode(), capture_output=True, check=True, timeout=60
    )
    return result.stdout


def list_elements(svg: bytes) -> list[ElementTree.Element]:
    return [*ElementTree.fromstring(svg).iter()]


def list_texts(svg: bytes) -> list[str]:
    """The lines of all labels; Graphviz writes spaces as such that do not break."""
    return [
        (element.text or "").replace("\xa0", " ")
        for element in list_elements(svg)
        if element.tag == f"{SVG}text"
    ]
