"""The peak of a report, and what is alive there, with places in the user's repository."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fxmem.analysis import Setup
from fxmem.graph import Category, SourceLocation, is_installed
from fxmem.report.document import Headline
from fxmem.report.json_report import read_record, refuse_damage

_OWNER_DEPTH = {"PARAMETER": 1, "BUFFER": 1, "GRADIENT": 2, "OPTIMIZER_STATE": 2}
"""Names after that of the module: ``fc.weight``, ``fc.weight.grad``, ``fc.weight.exp_avg``."""


@dataclass(frozen=True, slots=True)
class LiveStorage:
    """A storage alive at the peak, or the workspace of the kernel that runs there.

    Attributes:
        label: As in a report.
        category: Its purpose.
        nbytes: Its size.
        fqn: The module that made it or that it belongs to; empty for the model itself.
        shape: Of the first tensor on it; None for a workspace.
        dtype: Of that tensor; empty for a workspace.
        source: The line that made it; for a parameter, its gradient and its state, the line that
            first runs its module.
    """

    label: str
    category: Category
    nbytes: int
    fqn: str
    shape: tuple[int, ...] | None
    dtype: str
    source: SourceLocation | None


@dataclass(frozen=True, slots=True)
class Footprint:
    """The peak of a step: how much, where, and what is alive there, in order of allocation."""

    setup: Setup
    headline: Headline
    reserved_bytes: int
    breakdown: Mapping[Category, int]  # bytes by category; sums to the peak
    live: tuple[LiveStorage, ...]  # sums to the peak too
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
                LiveStorage(
                    storage["label"],
                    Category(storage["category"]),
                    storage["nbytes"],
                    fqn if node is None else node["fqn"],
                    tuple(storage["shape"]),
                    storage["dtype"],
                    found if node is None else place(node["source"]),
                )
            )
        if peak["workspace_bytes"]:
            running = {node["name"]: node for node in nodes}.get(peak["node"])
            label = peak["operation"].removesuffix(".default")
            workspace = (label, Category.WORKSPACE, peak["workspace_bytes"])
            fqn = running["fqn"] if running else ""
            live.append(LiveStorage(*workspace, fqn, None, "", place(peak["source"])))
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
