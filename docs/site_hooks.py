"""What the site makes of links that leave the documentation: the names of files."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for each page."""
    folder = posixpath.dirname(page.file.src_uri)

    def replace(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2].partition("#")[0]))
        if not target.startswith(".."):
            return match[0]
        return f"{match[1]} (`{target.removeprefix('../')}`)"

    return _LINK.sub(replace, markdown)
