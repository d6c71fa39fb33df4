"""Order, colours and hatches of the categories in every picture."""

from __future__ import annotations

from typing import NamedTuple

from fxmem.graph import Category


class Style(NamedTuple):
    """The look of a category."""

    light: str  # colour on a light ground: of Okabe and Ito, distinct with any colour vision
    dark: str
    hatch: str  # strokes that tell it from the others in grey


STYLES = {
    Category.PARAMETER: Style("#56718c", "#5f83b5", ""),
    Category.BUFFER: Style("#9aa5b1", "#77839a", "|"),
    Category.OPTIMIZER_STATE: Style("#0072b2", "#2f86c4", "\\"),
    Category.INPUT: Style("#f0e442", "#a39a2c", "-|"),
    Category.GRADIENT: Style("#009e73", "#2a9672", "/"),
    Category.ACTIVATION: Style("#e69f00", "#c98a1f", "."),
    Category.KV_CACHE: Style("#b07d48", "#8f6a45", "\\-"),
    Category.OUTPUT: Style("#cc79a7", "#a8578a", "/\\"),
    Category.TEMPORARY: Style("#56b4e9", "#4a93bd", "-"),
    Category.COMMUNICATION: Style("#d55e00", "#c0561a", "/-"),
    Category.WORKSPACE: Style("#d8d3c8", "#8d877a", "|/"),
}
"""In the order of stacking: what changes least at the bottom, and workspaces,
which are not storages, on top."""
