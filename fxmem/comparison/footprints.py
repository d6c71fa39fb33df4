"""The peak of a report, and what is alive there, with places in the user's repository."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fxmem.graph import Category, SourceLocation, is_installed
from fxmem.report.document import Headline, LiveRow
from fxmem.report.json_report import read_record, refuse_damage
from fxmem.setup import Setup

_OWNER_DEPTH = {"PARAMETER": 1, "BUFFER": 1, "GRADIENT": 2, "OPTIMIZER_STATE": 2}
"""Names after that of the module: ``fc.weight``, ``fc.weight.grad``, ``fc.weight.exp_avg``."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """The peak of a step: how much, where, and what is alive there, in order of allocation."""

    setup: Setup
    headline: Headline
    reserved_bytes: int
    breakdown: Mapping[Category, int]  # bytes by category; sums to the peak
    live: tuple[LiveRow, ...]  # sums to the peak too
    misfit: str = ""  # why the step does not fit its GPU

    @property
    def peak_bytes(self) -> int:
        """Most bytes allocated at any moment."""
        return self.headline.peak_bytes


def read_footprint(report: Mapping[str, Any], root: str = "") -> Footprint:
    """Reads the peak from the values of a report (``Analysis.to_dict()``).

    Args:
        report: The report; its ``operations``, ``saved`` and ``timeline`` may be missing.
        root: A folder, below which files are named relative to it.

    Raises:
        UsageError: The report is damaged.
    """

    def place(source: Mapping[str, Any] | None) -> SourceLocation | None:
        if source is None:
            return None
        found = SourceLocation(**source)
        if root and found.file.startswith(f"{root}{os.sep}") and not is_installed(found.file):
            return replace(found, file=os.path.relpath(found.file, root))
        return found

    with refuse_damage():
        peak, nodes, live = report["peak"], report["nodes"], []
        modules: dict[str, SourceLocation | None] = {}
        for node in nodes:
            if node["source"]:
                modules.setdefault(node["fqn"], place(node["source"]))
        for index in sorted(peak["live"]):
            storage = report["storages"][index]
            depth, name = _OWNER_DEPTH.get(storage["category"], 0), storage["name"]
            fqn = ".".join(name.split(".")[:-depth]) if depth else ""
            node = None if storage["node"] is None else nodes[storage["node"]]
            found = modules.get(fqn) if node is None and fqn else None
            live.append(
                LiveRow(
                    storage["nbytes"],
                    Category(storage["category"]),
                    storage["label"],
                    tuple(storage["shape"]),
                    storage["dtype"],
                    found if node is None else place(node["source"]),
                    fqn=fqn if node is None else node["fqn"],
                )
            )
        if peak["workspace_bytes"]:
            running = {node["name"]: node for node in nodes}.get(peak["node"])
            label = peak["operation"].removesuffix(".default")
            workspace = (peak["workspace_bytes"], Category.WORKSPACE, label)
            fqn = running["fqn"] if running else ""
            live.append(LiveRow(*workspace, None, "", place(peak["source"]), fqn=fqn))
        setup, lack, misfit = read_record(Setup, report), report["exhaustion"], ""
        if lack is not None and not setup.compiled:
            verb = "does" if lack["is_certain"] else "may"
            misfit = f"{verb} not fit {setup.gpu}: {lack['cause']}"
        where = read_record(Headline, {**peak, "peak_bytes": report["peak_bytes"]})
        return Footprint(
            setup,
            replace(where, source=place(peak["source"]), optimizer=setup.optimizer),
            report["reserved_bytes"],
            {Category(name): nbytes for name, nbytes in report["breakdown"].items()},
            tuple(live),
            misfit,
        )
