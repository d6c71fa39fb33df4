"""Loading and evaluation of a script, which are kept apart from its steps."""

from __future__ import annotations

from collections.abc import Callable, Container

import torch
from torch import nn
from torch.optim import Optimizer

from fxmem.analysis import Analysis
from fxmem.graph import Phase
from fxmem.scripts.script_recorder import ScriptRecorder
from fxmem.scripts.windows import EnoughSteps, Windows


class Apart:
    """Sees loading and evaluations begin and end.

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
        self._windows = windows
        self._recorder = recorder
        self._describe_window = describe_window
        self._begin_window = begin_window
        self._list_optimizers = list_optimizers

    def begin_window(self) -> None:
        """Sees a window begin, and with it perhaps a step."""
        self._has_begun = False

    def begin_model(self, model: nn.Module) -> None:
        """Sees a model begin: a step's, which may have begun with functions, or an evaluation's."""
        evaluates = not (torch.is_grad_enabled() or model.training)
        if self.phase is Phase.EVALUATION and evaluates:
            return
        has_begun = self._has_begun or bool(self._recorder.autograd.saves)
        if evaluates and not has_begun and self._is_trained(model):
            self._check_end()
            self.end()
            self._end_rest()
            self.phase = Phase.EVALUATION
        else:
            self.begin_step(with_functions=has_begun)

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
        if phase is None or len(self._recorder.operations) == 1:
            return
        number, name = self._windows.number, phase.value
        if phase is Phase.EVALUATION:
            name += f" after step {number - 1}" if number > 1 else " before step 1"
        with self._recorder.ledger.lock:
            self._windows.keep(self._describe_window(name, phase))
            self._begin_window()
        if phase is Phase.EVALUATION:
            self._check_end()

    def end_loading(self) -> None:
        """Sees an optimizer made."""
        if self.phase is Phase.LOADING:
            self.end()

    def end_resumption(self) -> None:
        """Sees a checkpoint loaded: what ran until then is loading, too, if no step has begun."""
        if self._windows.number == 1 and not (self._has_begun or self.phase):
            self.phase = Phase.LOADING
            self.end()

    def _check_end(self) -> None:
        """Ends the script where it goes on after its steps.

        What comes before a model, backward or an optimizer, such as a line that prints the peak, is
        the last step's.
        """
        if self._windows.is_over:
            raise EnoughSteps

    def _end_rest(self) -> None:
        """Keeps what ran since the last step apart from an evaluation."""
        if len(self._recorder.operations) == 1:
            return
        number = self._windows.number
        name, phase = f"after step {number - 1}", None
        if number == 1:
            name, phase = Phase.LOADING.value, Phase.LOADING
        with self._recorder.ledger.lock:
            self._windows.see_rest(self._describe_window(name, phase))
            self._begin_window()

    def _is_trained(self, model: nn.Module) -> bool:
        own = {id(each) for each in model.parameters()}
        return any(trains(optimizer, own) for optimizer in self._list_optimizers())


def trains(optimizer: Optimizer, parameters: Container[int]) -> bool:
    """Returns whether an optimizer has one of the parameters, which are given by their ids."""
    return any(
        id(each) in parameters for group in optimizer.param_groups for each in group["params"]
    )
