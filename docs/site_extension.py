"""What the site makes of docstrings: doctests become blocks of code, roles plain names."""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"(?:^|(?<=\n\n))(>>> .*?)(?=\n\n|\Z)", re.DOTALL)
_ROLE = re.compile(r":(?:class|func|meth|mod|attr):(?=`)")


class ShowDocstrings(griffe.Extension):
    """Docstrings as Markdown."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Called by griffe for each function, class, attribute and module."""
        if obj.docstring:
            text = _ROLE.sub("", obj.docstring.value)
            obj.docstring.value = _DOCTEST.sub(r"```pycon\n\1\n```", text)
