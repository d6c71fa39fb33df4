"""The code blocks of the documentation, for the tests that run them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    path
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
    if path.parent.name != "results"  # which the benchmarks write
]
_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: The file that it is in.
        line: Where it begins there.
        language: After the fence.
        mark: The comment right above it, which says what the text is; else empty.
        text: What is in it, with its last newline.
    """

    page: Path
    line: int
    language: str
    mark: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    def rewrite(self, text: str) -> None:
        """Puts another text in its place, in the file."""
        whole = self.page.read_text(encoding="utf-8")
        start = f"<!-- {self.mark} -->\n```{self.language}\n"
        assert whole.count(f"{start}{self.text}```") == 1
        whole = whole.replace(f"{start}{self.text}```", f"{start}{text}```")
        self.page.write_text(whole, encoding="utf-8")


def list_blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page,
            text[: match.start()].count("\n") + 1,
            match["language"],
            match["mark"] or "",
            match["text"],
        )
        for match in _BLOCK.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in list_blocks(page)]


def list_commands(block: Block) -> list[str]:
    """The commands of a bash block, without what sets up before them."""
    return [
        line.rpartition("&& ")[2].removeprefix(".venv/bin/") for line in block.text.splitlines()
    ]
