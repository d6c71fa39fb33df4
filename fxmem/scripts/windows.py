"""The steps that a session has recorded, and how many are to come."""

from __future__ import annotations

from dataclasses import replace

from fxmem.analysis import Analysis
from fxmem.errors import UsageError
from fxmem.tracing.compiled import compare_peaks

LONG_STEP = 100_000
"""Operators of a step, as of a GPT of 20 layers that accumulates 32 gradients (nanochat)."""


class Windows:
    """The steps that have ended, one after the other.

    Args:
        count: How many steps to record; None for three, or two long ones.
        adds_eager_step: Whether a step in eager mode follows those of compiled code, to compare.

    Attributes:
        steps: The analysis of each.
        loading: The analysis of what ran before an optimizer was made; None for nothing.
        runs_eagerly: Whether the step in eager mode runs.

    Raises:
        UsageError: No step is asked for.
    """

    def __init__(self, count: int | None, *, adds_eager_step: bool) -> None:
        if count is not None and count < 1:
            raise UsageError(f"--steps must be 1 or more, got {count}")
        self.steps: list[Analysis] = []
        self.loading: Analysis | None = None
        self.runs_eagerly = False
        self._count = count
        self._adds_eager_step = adds_eager_step
        self._eager_bytes: int | None = None
        self._warm_ups = 0

    @property
    def recorded(self) -> list[Analysis]:
        """Loading, if there was any, and the steps."""
        return [*filter(None, (self.loading,)), *self.steps]

    @property
    def number(self) -> int:
        """The number of the step that runs."""
        return len(self.steps) + 1 - self._warm_ups

    @property
    def is_done(self) -> bool:
        """True once all steps asked for are recorded; where none were, three, or two long ones."""
        is_long = any(len(step.graph.operations) > LONG_STEP for step in self.steps)
        return self.number > (self._count or (2 if is_long else 3))

    @property
    def is_over(self) -> bool:
        """True once no step is to come, in eager mode neither."""
        return self.is_done and not self.runs_eagerly

    def keep(self, step: Analysis) -> None:
        """Keeps a step, or the peak of the one in eager mode."""
        if self.runs_eagerly:
            self._eager_bytes, self.runs_eagerly = step.peak_bytes, False
            return
        self.steps.append(step)
        is_compiled = step.setup.compile == "compiled"
        self.runs_eagerly = self._adds_eager_step and self.is_done and is_compiled

    def call_warm_ups(self) -> None:
        """Calls what has run so far a warm-up, and no step."""
        self._warm_ups = len(self.steps)
        for index, step in enumerate(self.steps):
            window = step.setup.window.replace("step", "warm-up")
            self.steps[index] = replace(step, setup=replace(step.setup, window=window))

    def describe_running(self) -> str:
        """Describes the step that runs."""
        return "a step in eager mode" if self.runs_eagerly else f"step {self.number}"

    def list_notes(self) -> list[str]:
        """Compares the peaks in eager mode and of compiled code, where both have run."""
        if self._eager_bytes is None:
            return []
        return [compare_peaks(self._eager_bytes, max(step.peak_bytes for step in self.steps))]
