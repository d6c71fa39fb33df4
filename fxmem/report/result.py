"""Results that show themselves: as text, Markdown, CSV, HTML and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxmem.report.blocks import Block, render_csv, render_markdown, render_text


class Result:
    """A result, whose report is made of its blocks.

    Subclasses have ``list_blocks`` and ``to_dict``; all else follows from these.
    """

    __slots__ = ()

    def list_blocks(self, *args: Any, **shown: Any) -> list[Block]:
        """Lists the blocks of the report: headings, paragraphs, listings and tables."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain dicts, lists, strings and integers: what :meth:`to_json` writes."""
        raise NotImplementedError

    def list_bars(self) -> Mapping[str, int | None]:
        """Lists peaks that a notebook compares as bars, each with its label."""
        return {}

    def draw_pictures(self) -> Iterator[tuple[str, bytes]]:
        """Draws the pictures that a notebook shows: the view and the SVG of each."""
        return iter(())

    @property
    def pictured(self) -> Any:
        """The step that pictures of the result are of; None for none."""
        return None

    def to_json(self, indent: int | None = None) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_text(self, *, width: int | None = None, markdown: bool = False, **shown: Any) -> str:
        """Writes the report that the command line prints.

        Args:
            width: Columns of its tables and lines; None for no limit.
            markdown: Write Markdown, for the summary of a run in CI or a comment.
            shown: Arguments of ``list_blocks``, such as ``top``, the number of rows of a table.
        """
        blocks = self.list_blocks(**shown)
        return render_markdown(blocks) if markdown else render_text(blocks, width)

    def to_csv(self, **shown: Any) -> str:
        """Writes the tables of the report as CSV, in which bytes are integers."""
        return render_csv(self.list_blocks(**shown))

    def __str__(self) -> str:
        return self.to_text().rstrip("\n")

    def _repr_html_(self) -> str:
        from fxmem.report.html import write_fragment

        return write_fragment(self)


@dataclass(frozen=True, slots=True)
class Report(Result):
    """Blocks that were put together, and the values that JSON has in their place."""

    blocks: Sequence[Block]
    values: Any

    def list_blocks(self) -> list[Block]:
        return [*self.blocks]

    def to_json(self, indent: int | None = None) -> str:
        if isinstance(self.values, Result):
            return self.values.to_json(indent)
        return json.dumps(self.values, indent=indent)
