"""Loading, evaluation, generation and saving of a script, which are kept apart from its steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from fxmem.analysis import Analysis
from fxmem.graph import RESIDENT, Phase
from fxmem.scripts.script_recorder import ScriptRecorder
from fxmem.scripts.windows import EnoughSteps, Windows
from fxmem.units import format_bytes

_GENERATE = "generate"


class Apart:
    """Sees loading, evaluations, generations and saving begin and end.

    Args:
        windows: Keeps what is recorded.
        recorder: Records the operators.
        describe_window: Analyses what has run since the window began, by a name and a phase.
        begin_window: Begins another window.
        list_optimizers: Lists the optimizers of the script.

    Attributes:
        phase: What runs; None for a step.
    """

    def __init__(
        self,
        windows: Windows,
        recorder: ScriptRecorder,
        describe_window: Callable[[str, Phase | None], Analysis],
        begin_window: Callable[[], None],
        list_optimizers: Callable[[], list[Optimizer]],
    ) -> None:
        self.phase: Phase | None = Phase.LOADING
        self._has_begun = False
        self._evaluations = 0  # calls in what seems to be a step, of models that it does not train
        self._calls = [0]
        self._saved = 0  # the number of the step that runs, once a checkpoint was written before it
        self._windows = windows
        self._recorder = recorder
        self._describe_window = describe_window
        self._begin_window = begin_window
        self._list_optimizers = list_optimizers

    def begin_window(self) -> None:
        """Sees a window begin, and with it perhaps a step."""
        self._has_begun, self._evaluations = False, 0

    def begin_model(self, model: nn.Module) -> None:
        """Sees a model begin: a step's, which may have begun with functions, or another's.

        An evaluation may generate, call parts that are left in ``train()``, and a generation call
        several models.
        """
        evaluates = not (torch.is_grad_enabled() or model.training)
        generates = not torch.is_grad_enabled() and _is_generating()
        if self.phase is Phase.EVALUATION and not torch.is_grad_enabled():
            return
        if self.phase is Phase.GENERATION and generates:
            self._calls.append(len(self._recorder.operations))
            return
        has_begun = self._has_begun or self._holds_saves()
        if not has_begun and (generates or (evaluates and self._is_trained(model))):
            self._check_end()
            self.end()
            self._end_rest()
            self.phase = Phase.GENERATION if generates else Phase.EVALUATION
            self._calls = [0]
        else:
            if not evaluates:
                self.end_evaluations()
                has_begun = self._has_begun
            self.begin_step(with_functions=has_begun)
            if evaluates and (self._evaluations or not (has_begun or self._is_other(model))):
                self._evaluations += 1

    def _holds_saves(self) -> bool:
        """Returns whether something is kept for a backward: a norm that was logged is not."""
        storages = self._recorder.ledger.storages
        saved = (storages[save.storage] for save in self._recorder.autograd.saves)
        return any(storage.born != RESIDENT and storage.died is None for storage in saved)

    def begin_step(self, *, with_functions: bool = True) -> None:
        """Sees the next part of a step begin: a model, backward, or an optimizer.

        A step may have begun with functions, where loading ended unseen.

        Raises:
            EnoughSteps: It is no part of the steps that are recorded.
        """
        self._check_end()
        if self.phase is Phase.LOADING and with_functions:
            self.phase = None
        self.end()
        self._has_begun = True

    def end(self) -> None:
        """Keeps what has run apart from the steps, if anything did."""
        phase, self.phase = self.phase, None
        # Of saving what is there is told, even if no more is made.
        if phase is None or (len(self._recorder.operations) == 1 and phase is not Phase.SAVING):
            return
        number, name = self._windows.number, phase.value
        if phase is not Phase.LOADING and number > 1:
            name += f" after step {number - 1}"
        elif phase is not Phase.LOADING and self._list_optimizers():
            name += " before step 1"
        with self._recorder.ledger.lock:
            window = self._describe_window(name, phase)
            if phase is Phase.GENERATION and len(self._calls) > 1:
                window = _note_calls(window, self._calls)
            self._windows.keep(window)
            self._begin_window()
        if phase is not Phase.LOADING:
            self._check_end()

    def end_loading(self) -> None:
        """Sees an optimizer made."""
        if self.phase is Phase.LOADING:
            self.end()
        self.end_evaluations()

    def end_evaluations(self) -> None:
        """Keeps evaluations apart that seemed to be a step, once the script trains.

        Of a model before it has an optimizer, or of an average of a trained model's weights. What
        is called once for a step may be its teacher.
        """
        if self._evaluations > (1 if self._list_optimizers() else 0):
            self.phase = Phase.EVALUATION
            self.end()

    def end_resumption(self) -> None:
        """Sees a checkpoint loaded: what ran until then is loading, too, if no step has begun."""
        if self._windows.number == 1 and not (self._has_begun or self.phase):
            self.phase = Phase.LOADING
            self.end()

    def see_saving(self) -> None:
        """Sees a checkpoint written after a step: what has run since then belongs to saving."""
        number = self._windows.number
        if number == 1 or self._has_begun:
            return
        self.end()
        if self._saved != number or len(self._recorder.operations) > 1:
            self._saved, self.phase = number, Phase.SAVING
            self.end()

    def _check_end(self) -> None:
        """Ends the script where it goes on after its steps.

        What comes before a model, backward or an optimizer, such as a line that prints the peak, is
        the last step's.
        """
        if self._windows.is_over:
            raise EnoughSteps

    def _end_rest(self) -> None:
        """Keeps what ran since the last step apart from what begins."""
        if len(self._recorder.operations) == 1:
            return
        number = self._windows.number
        name, phase = f"after step {number - 1}", None
        if number == 1:
            name, phase = Phase.LOADING.value, Phase.LOADING
        with self._recorder.ledger.lock:
            self._windows.see_rest(self._describe_window(name, phase))
            self._begin_window()

    def _is_other(self, model: nn.Module) -> bool:
        """Returns whether a model is no copy of the one that is trained."""
        groups = [
            group for optimizer in self._list_optimizers() for group in optimizer.param_groups
        ]
        trained = sorted(tuple(each.shape) for group in groups for each in group["params"])
        return bool(groups) and trained != sorted(tuple(each.shape) for each in model.parameters())

    def _is_trained(self, model: nn.Module) -> bool:
        own = {id(each) for each in model.parameters()}
        return any(trains(optimizer, own) for optimizer in self._list_optimizers())


def _note_calls(window: Analysis, calls: list[int]) -> Analysis:
    """Notes the peaks of the first and the last call of models, by where each call begins."""
    live_bytes = window.profile.live_bytes
    first, last = max(live_bytes[: calls[1]]), max(live_bytes[calls[-1] :])
    note = (
        f"Of {len(calls):,} calls of the model the first takes {format_bytes(first)}, and the last"
        f" {format_bytes(last)}."
    )
    setup = window.setup
    return replace(window, setup=replace(setup, notes=(*setup.notes, note)))


def _is_generating() -> bool:
    """Returns whether a function called ``generate`` runs, as language models have one."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name != _GENERATE:
        frame = frame.f_back
    return frame.f_code.co_name == _GENERATE


def list_waiting(optimizers: Iterable[Optimizer], stepped: Container[int]) -> Iterator[int]:
    """Lists the ids of the optimizers with a parameter that none has updated which stepped.

    One around another has the same: davda54's SAM, whose own ``step`` a loop need not call.
    """
    parameters = {
        id(optimizer): {id(each) for group in optimizer.param_groups for each in group["params"]}
        for optimizer in optimizers
    }
    updated = set[int]().union(*(own for key, own in parameters.items() if key in stepped))
    for key, own in parameters.items():
        if key not in stepped and not own <= updated:
            yield key


def trains(optimizer: Optimizer, parameters: Container[int]) -> bool:
    """Returns whether an optimizer has one of the parameters, which are given by their ids."""
    return any(
        id(each) in parameters for group in optimizer.param_groups for each in group["params"]
    )
