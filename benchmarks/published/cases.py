"""Published measurements, as the files in tests/data/cuda/published have them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "tests" / "data" / "cuda" / "published"
CONFIGURATIONS = ("stated", "inferred", "weak")
CAUSES = ("torch version", "library", "process", "not modelled", "unknown")
KIB = 1024


@dataclass(frozen=True)
class Case:
    """One configuration that was measured, with one or more figures.

    Attributes:
        source: The data file and the module of its models.
        id: Unique in its source.
        origin: Repository, commit and file of the publication.
        gpu: As ``fxmem.analyze(gpu=)`` takes it; None where it is not named.
        torch: The version that was measured, as far as it is known.
        configuration: ``stated``, ``inferred`` or ``weak``.
        inferred: What of the configuration was concluded, and from what.
        config: What the source's module needs to know.
        measured: Bytes by figure. A figure's name begins with ``allocated``, ``requested`` or
            ``reserved``, and goes on where it is no peak: ``allocated after forward``.
        rounding_bytes: To how many bytes the figures were published; 1 for all digits.
        slow: Whether a prediction takes more than about two seconds.
        cause_kind: Where a figure differs, one of ``CAUSES``.
        cause: Likewise, why it differs, in a sentence.
        error: Predicted minus measured, in bytes, by figure, as recorded.
        recorded_with: The torch version that predicted that.
    """

    source: str
    id: str
    origin: str
    gpu: str | None
    torch: str
    configuration: str
    inferred: tuple[str, ...]
    config: Mapping[str, Any]
    measured: Mapping[str, int]
    rounding_bytes: int
    slow: bool
    cause_kind: str
    cause: str
    error: Mapping[str, int]
    recorded_with: str

    @property
    def repository(self) -> str:
        """Owner and name on GitHub, or the source's name where it is published elsewhere."""
        found = re.match(r"(?:github\.com/)?([\w.-]+/[\w.-]+)", self.origin)
        return found[1].rstrip(".") if found else self.source

    def __str__(self) -> str:
        return f"{self.source}: {self.id}"


def list_sources(data: Path = DATA) -> list[str]:
    """The names of all sources."""
    return sorted(path.stem for path in data.glob("*.json"))


def load_cases(source: str, data: Path = DATA) -> list[Case]:
    """The cases of a source.

    A field that all cases of a file share may stand beside ``cases`` instead of in each.

    Raises:
        ValueError: A case does not say what it has to.
    """
    file = json.loads((data / f"{source}.json").read_text())
    return [_read_case(source, file | case) for case in file["cases"]]


def load_all(data: Path = DATA) -> list[Case]:
    """The cases of all sources."""
    return [case for source in list_sources(data) for case in load_cases(source, data)]


def _read_case(source: str, fields: Mapping[str, Any]) -> Case:
    case = Case(
        source=source,
        id=fields["id"],
        origin=fields["origin"],
        gpu=fields["gpu"],
        torch=fields["torch"],
        configuration=fields["configuration"],
        inferred=tuple(fields.get("inferred", ())),
        config=fields.get("config", {}),
        measured=fields["measured"],
        rounding_bytes=fields.get("rounding_bytes", 1),
        slow=fields.get("slow", False),
        cause_kind=fields.get("cause_kind", ""),
        cause=fields.get("cause", ""),
        error=fields.get("error", {}),
        recorded_with=fields.get("recorded_with", ""),
    )
    if case.configuration not in CONFIGURATIONS:
        raise ValueError(f"{case}: configuration {case.configuration!r}")
    if case.cause_kind and case.cause_kind not in CAUSES:
        raise ValueError(f"{case}: cause_kind {case.cause_kind!r}")
    for name, nbytes in case.measured.items():
        if name.split()[0] not in ("allocated", "requested", "reserved") or nbytes <= 0:
            raise ValueError(f"{case}: figure {name!r} of {nbytes!r} bytes")
    return case


def is_equal(case: Case, error_bytes: int) -> bool:
    """Tells whether a prediction is the published figure, to the KiB or to its last digit."""
    return abs(error_bytes) < max(KIB, case.rounding_bytes)


def record_errors(
    source: str, errors: Mapping[str, Mapping[str, int]], torch_version: str, data: Path = DATA
) -> None:
    """Writes predicted minus measured into a source's file.

    Args:
        source: Its name.
        errors: By case and figure.
        torch_version: The version that predicted.
        data: The folder of the files.
    """
    path = data / f"{source}.json"
    file = json.loads(path.read_text())
    for case in file["cases"]:
        if case["id"] in errors:
            case["error"] = dict(errors[case["id"]])
            case["recorded_with"] = torch_version
    path.write_text(json.dumps(file, indent=1, ensure_ascii=False) + "\n")
