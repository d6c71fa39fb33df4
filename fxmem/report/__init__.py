"""Reports: their blocks, and what is written and drawn from them."""

from __future__ import annotations

from fxmem.report.blocks import Heading, Listing, Paragraph
from fxmem.report.tables import Table

__all__ = ["Heading", "Listing", "Paragraph", "Table"]
