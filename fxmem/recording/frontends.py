"""Which tracer serves a model: ``fx``, whose sizes stay nodes, or ``record``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fxmem.errors import DataDependentError, TraceError
from fxmem.recording.failures import is_traced
from fxmem.recording.step import Recording

FRONTENDS = ("fx", "record")


@dataclass(frozen=True, slots=True)
class Served:
    """A recording, and the frontend that made it.

    Attributes:
        recording: The step.
        frontend: ``fx`` or ``record``.
        reason: Why ``fx`` did not serve; empty where it did.
    """

    recording: Recording
    frontend: str
    reason: str


def record_with_frontend(record: Callable[[bool], Recording], frontend: str | None) -> Served:
    """Records with the frontend asked for, else with the first that serves.

    Args:
        record: Records a step, with sizes that stay nodes or without.
        frontend: The frontend asked for, or None.

    Raises:
        TraceError: The step fails, or ``fx`` was asked for and cannot express the model.
    """
    if frontend == "record":
        return Served(record(False), "record", "record was asked for")
    try:
        recording = record(True)
    except DataDependentError:
        raise
    except TraceError as error:
        # What is no fault of sizes that are nodes fails in `record` again.
        if frontend == "fx" or not is_traced(error.__cause__ or error):
            raise
        reason = error.cause
    else:
        if not recording.reason:
            return Served(recording, "fx", "")
        if frontend == "fx":
            raise TraceError(
                f"the fx frontend cannot express this model: {recording.reason}",
                hint="leave the frontend out, and record will serve",
            )
        return Served(recording, "record", recording.reason)
    return Served(record(False), "record", reason)
