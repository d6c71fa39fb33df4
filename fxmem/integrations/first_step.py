"""The first training step of a trainer, analysed before it runs, and the plan for it."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn, optim

from fxmem.analysis import Analysis
from fxmem.analyzing import analyze
from fxmem.applying.applying import apply
from fxmem.applying.auto import find_memory
from fxmem.applying.plan_search import plan
from fxmem.errors import FxmemError, FxmemWarning, InfeasibleError
from fxmem.planning.plan import Plan
from fxmem.units import format_bytes, resolve_bytes

_LOGGER = logging.getLogger("fxmem")


class FirstStep:
    """The check of a trainer's first step, which its callback makes.

    Attributes:
        analysis: Of the step; None before the first step, or if it cannot be analysed.
        plan: The plan that was applied; None for none.
    """

    analysis: Analysis | None = None
    plan: Plan | None = None

    def __init__(
        self,
        *,
        budget: str | float | None = None,
        apply: bool = False,
        max_overhead: float | None = None,
        time_limit_s: float | None = None,
        **options: Any,
    ) -> None:
        """Takes the limit, and how to plan and to analyse.

        Args:
            budget: Most memory of the step, in bytes or as ``"20GiB"``. None for the memory of
                ``gpu``, or else of the GPU that the model is on; on the CPU no limit.
            apply: Whether to apply a plan: the cheapest within the budget where the step exceeds
                it, or the one with the lowest peak for ``max_overhead``. Else a step over the
                budget is refused.
            max_overhead: Most time that the plan may add, as a share of the step's.
            time_limit_s: As for :func:`fxmem.plan`.
            options: Arguments of :func:`fxmem.analyze`, in place of what the trainer says:
                ``gpu``, ``device``, ``loss``, ...
        """
        self._budget, self._applies, self._max_overhead = budget, apply, max_overhead
        self._time_limit_s, self._options = time_limit_s, options

    def check(
        self, model: nn.Module, args: Any, kwargs: Any, style: str | None = None, **found: Any
    ) -> nn.Module:
        """Analyses the step of a model, and applies a plan if that is asked for.

        Args:
            model: The model, or the whole step as one.
            args: Positional inputs of the first step.
            kwargs: Keyword inputs.
            style: That of plans.
            found: Arguments of :func:`fxmem.analyze`, as the trainer has them.

        Returns:
            The model with the plan, or the model itself.

        Raises:
            InfeasibleError: The step takes more than the budget, and no plan is asked for; or
                there is none.
            FxmemError: The step cannot be analysed, and a plan is asked for.
        """
        device = next((p.device.type for p in model.parameters()), "cpu")
        options = {"device": "cpu" if device == "cpu" else "cuda", **found, **self._options}
        if options.get("gpu") is not None:
            options["device"] = self._options.get("device", "cuda")
        try:
            analysis = self.analysis = analyze(model, args, kwargs, **options)
        except FxmemError as error:
            if self._applies:
                raise
            cause = f"the first step is not checked: {error}"
            warnings.warn(cause, FxmemWarning, stacklevel=2)
            return model
        budget = self._find_budget(device, options.get("gpu"))
        peak = f"{format_bytes(analysis.peak_bytes)} in {analysis.peak.phase.value}"
        if analysis.peak.source is not None:
            peak = f"{peak}, {analysis.peak.source}"
        is_over = budget is not None and analysis.peak_bytes > budget
        if is_over and not self._applies:
            raise InfeasibleError(
                f"the training step takes {peak}, more than {format_bytes(budget or 0)}",
                hint="apply=True applies a plan; or a smaller batch",
            )
        if not self._applies or (not is_over and self._max_overhead is None):
            _LOGGER.info("The training step takes %s.", peak)
            return model
        self.plan = plan(
            analysis,
            budget=budget if self._max_overhead is None else None,
            max_overhead=self._max_overhead,
            time_limit_s=self._time_limit_s,
            style=style,
        )
        after, overhead = format_bytes(self.plan.peak_bytes), self.plan.overhead
        _LOGGER.info(
            "The training step takes %s; %s for %.1f %% more time by a plan.",
            peak,
            after,
            100 * overhead,
        )
        return apply(model, self.plan)

    def _find_budget(self, device: str, gpu: str | None) -> int | None:
        if self._budget is not None:
            return resolve_bytes(self._budget)
        return None if gpu is None and device == "cpu" else find_memory(gpu)


def describe_optimizer(
    optimizer: optim.Optimizer, model: nn.Module
) -> Callable[[Sequence[nn.Parameter]], optim.Optimizer]:
    """Describes an optimizer as :func:`fxmem.analyze` takes one, with its groups and settings.

    Args:
        optimizer: Of the model's parameters.
        model: The model.
    """
    kind: Any = type(optimizer)
    accepted = inspect.signature(kind).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    places = {id(parameter): at for at, parameter in enumerate(trained)}
    groups: list[tuple[Mapping[str, Any], list[int]]] = [
        (
            {name: value for name, value in group.items() if name in settings},
            [places[id(each)] for each in group["params"] if id(each) in places],
        )
        for group in optimizer.param_groups
    ]

    def make(parameters: Sequence[nn.Parameter]) -> optim.Optimizer:
        of_groups = [{**own, "params": [parameters[at] for at in ats]} for own, ats in groups]
        made: optim.Optimizer = kind([group for group in of_groups if group["params"]], **settings)
        return made

    make.__name__ = kind.__name__
    return make
