"""The findings of fxmem's own, in order of their codes.

A further one is a function from an analysis to its findings, a line in :data:`_FINDERS`, and a
section in ``findings.md``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files

from fxmem.advice.activations import find_attention, find_logits, find_upcasts
from fxmem.advice.checkpoints import find_wide_checkpoints
from fxmem.advice.holding import find_cache, find_gradients, find_held_outputs
from fxmem.finding import Finder, register_finding

_FINDERS: Mapping[str, Finder] = {
    "FX101": find_logits,
    "FX102": find_upcasts,
    "FX103": find_attention,
    "FX104": find_cache,
    "FX105": find_held_outputs,
    "FX106": find_wide_checkpoints,
    "FX201": find_gradients,
}


def register_findings() -> None:
    """Registers each section of the page of findings, with what finds it."""
    page = (files("fxmem.advice") / "findings.md").read_text(encoding="utf-8")
    for section in re.split(r"^## (?=FX\d)", page, flags=re.MULTILINE)[1:]:
        code, title, text = re.split(r": |\n", section, maxsplit=2)
        register_finding(code, _FINDERS.get(code), title, text)


register_findings()
