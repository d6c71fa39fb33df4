"""The steps that a session has recorded, what ran apart from them, and how many are to come."""

from __future__ import annotations

from dataclasses import replace

from fxmem.analysis import Analysis
from fxmem.errors import UsageError
from fxmem.graph import Phase
from fxmem.scripts.script_run import find_apart
from fxmem.tracing.compiled import compare_peaks

LONG_STEP = 100_000
"""Operators of a step, as of a GPT of 20 layers that accumulates 32 gradients (nanochat)."""


_PHASES = {"evaluation": Phase.EVALUATION, "save": Phase.SAVING}


class EnoughSteps(BaseException):
    """Ends the script: all steps asked for are recorded, and another begins."""


class Windows:
    """The windows that have ended, one after the other.

    Args:
        count: How many steps to record; None for three, or two long ones.
        until: The steps go on until an ``"evaluation"`` or a ``"save"`` was recorded, until the
            ``"epoch"`` is over, or until so many have run; of further ones those are kept that are
            larger than any before. None to end with the steps asked for.
        adds_eager_step: Whether a step in eager mode follows those of compiled code, to compare.

    Attributes:
        recorded: The analysis of each that is reported: a step, or what ran apart from the steps.
        ended: The analyses of these, and of what ran between a step and an evaluation.
        until: As given.
        runs_eagerly: Whether the step in eager mode runs.
        batch: The batch that the step has, where it was chosen.
        read_batches: How many batches were read, while they are chosen.
        notes: On the batches that were chosen.

    Raises:
        UsageError: No step is asked for.
    """

    def __init__(
        self,
        count: int | None,
        *,
        until: str | int | None = None,
        adds_eager_step: bool = False,
    ) -> None:
        if count is not None and count < 1:
            raise UsageError(f"--steps must be 1 or more, got {count}")
        self.recorded: list[Analysis] = []
        self.ended: list[Analysis] = []
        self.runs_eagerly = False
        self.batch = ""
        self.read_batches = 0
        self.notes: list[str] = []
        self._count = count
        self.until = until
        self._adds_eager_step = adds_eager_step and until is None
        self._number_ended = self._left_out = 0
        self._follows_apart = False  # what was kept may have grown
        self._seen: set[Phase] = set()  # apart from the steps, after the first
        self._last_of_epoch = 0
        self._rest: Analysis | None = None
        self._eager_bytes: int | None = None

    @property
    def steps(self) -> list[Analysis]:
        """The steps."""
        return [window for window in self.recorded if find_apart(window) is None]

    @property
    def number(self) -> int:
        """The number of the step that runs."""
        return self._number_ended + 1

    @property
    def is_done(self) -> bool:
        """True once all that was asked for is recorded, and a step after a checkpoint."""
        keeps = self.until == "save" and self._follows_apart
        return self._has_steps and self._is_reached and not keeps

    @property
    def leaves_out(self) -> bool:
        """True for a step that is not reported, if it is like one that was."""
        return self._has_steps and self.until is not None and not self._follows_apart

    @property
    def _is_reached(self) -> bool:
        """True once the script has come as far as was asked for."""
        if isinstance(self.until, int):
            return self.number > self.until
        if self.until == "epoch":
            return 0 < self._last_of_epoch < self.number
        return self.until is None or _PHASES[self.until] in self._seen

    @property
    def _has_steps(self) -> bool:
        """True once all steps asked for are recorded; where none were, three, or two long ones."""
        is_long = any(len(step.graph.operations) > LONG_STEP for step in self.steps)
        return self.number > (self._count or (2 if is_long else 3))

    @property
    def is_over(self) -> bool:
        """True once no step is to come, in eager mode neither."""
        return self.is_done and not self.runs_eagerly

    def keep(self, window: Analysis) -> None:
        """Keeps a window, or the peak of the step in eager mode."""
        self.ended.append(window)
        if find_apart(window) is not None:
            self._follows_apart = True
            if self.runs_eagerly:  # of a step that only its peak is kept of
                return
            rest, self._rest = self._rest, None
            around = [window.peak_bytes, *[each.peak_bytes for each in self.recorded]]
            if rest is not None and rest.peak_bytes > max(around):
                self.recorded.append(rest)
            self.recorded.append(window)
            if self.steps:
                self._seen.add(window.graph.operations[0].phase)
            return
        self._follows_apart = False
        if self.runs_eagerly:
            self._eager_bytes, self.runs_eagerly = window.peak_bytes, False
            return
        has_steps, self._number_ended = self._has_steps, self._number_ended + 1
        if has_steps and window.peak_bytes <= max(each.peak_bytes for each in self.steps):
            self._left_out += 1
            return
        self.recorded.append(window)
        is_compiled = window.setup.compile == "compiled"
        self.runs_eagerly = self._adds_eager_step and self.is_done and is_compiled

    def end_epoch(self) -> None:
        """Sees a loader end that steps draw from; of one that reads ahead a batch is to come."""
        if self.steps:
            self._last_of_epoch = self._last_of_epoch or self.number

    def pass_over(self) -> None:
        """Counts a step whose models did not run."""
        self._number_ended += 1
        self._left_out += 1

    def see_rest(self, window: Analysis) -> None:
        """Sees what ran before an evaluation, which is kept if it took more than all around it."""
        self.ended.append(window)
        self._rest = window

    def name_step(self) -> str:
        """Names the step that runs, after its batch where that was chosen."""
        return f"step {self.number}, {self.batch}" if self.batch else f"step {self.number}"

    def expect(self, count: int) -> None:
        """Asks for so many steps, where no number was given."""
        self._count = self._count or count

    def call_warm_ups(self) -> None:
        """Calls what has run so far a warm-up, and no step."""
        self._number_ended = 0
        for index, each in enumerate(self.recorded):
            window = each.setup.window.replace("step", "warm-up")
            self.recorded[index] = replace(each, setup=replace(each.setup, window=window))

    def describe_running(self) -> str:
        """Describes the step that runs."""
        if self.read_batches:
            return f"batch {self.read_batches:,} of the loader"
        return "a step in eager mode" if self.runs_eagerly else f"step {self.number}"

    def list_notes(self) -> list[str]:
        """Lists notes on steps that are not listed, and on the peak in eager mode."""
        notes = [*self.notes]
        if not (self._is_reached or self._last_of_epoch):
            article = "a" if self.until == "save" else "an"
            is_number = isinstance(self.until, int)
            what = f"step {self.until:,}" if is_number else f"{article} {self.until}"
            notes.append(f"The script ended before {what} did.")
        if self._left_out:
            notes.append(
                f"{self._left_out} more steps are not listed: on inputs of sizes that were recorded"
                " models did not run again, and no other took more."
            )
        if self._eager_bytes is not None:
            most = max(step.peak_bytes for step in self.steps)
            notes.append(compare_peaks(self._eager_bytes, most))
        return notes
