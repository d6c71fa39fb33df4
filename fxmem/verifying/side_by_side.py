"""Steps of two models in turns, from the same state each time."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxmem.applying.comparing import Record, compare_records
from fxmem.applying.state import save_state, seed_random_numbers
from fxmem.applying.verification import Difference, Kind
from fxmem.errors import FxmemError, FxmemWarning, TraceError, UsageError, summarize_error
from fxmem.tracing.source import find_raising_source
from fxmem.verifying.running import Runner

_HINT = "inputs without values are random, integers 0 or 1; fxmem.verify takes tensors too"


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the steps of two models compare.

    Attributes:
        steps: How many were compared.
        record: What the last of them computed in the first model.
        differences: What differs from it in the second.
        times_s: Seconds of each step, of the first model and of the second.
    """

    steps: int
    record: Record
    differences: tuple[Difference, ...]
    times_s: tuple[tuple[float, ...], tuple[float, ...]]

    @property
    def runs(self) -> bool:
        """Whether the second model's step works at all."""
        return all(difference.kind is not Kind.ERROR for difference in self.differences)


def compare_models(ours: Runner, theirs: Runner, steps: int, seed: int) -> Comparison:
    """Takes steps of two models in turns, until something differs.

    As long as nothing does, the state after a step of either is the state to go on from: one
    copy of it is enough, from which the second model's step begins where the first one's did.

    Args:
        ours: Of the model.
        theirs: Of the other; where it has parameters of its own, they get the model's values.
        steps: How many to take at most.
        seed: Of the random numbers of the first step.

    Raises:
        TraceError: The first model's step fails.
        UsageError: The second model does without its plan.
    """
    _copy_values(ours, theirs)
    ours.prepare()
    theirs.prepare()
    seed_random_numbers(seed)
    our_times: list[float] = []
    their_times: list[float] = []
    record: Record = {}
    differences: tuple[Difference, ...] = ()
    step = 0
    while step < steps and not differences:
        step += 1
        restore = save_state(theirs.roots)
        record, seconds = _run_first(ours)
        our_times.append(seconds)
        restore()
        theirs.target = ours.target
        try:
            their_record, seconds = _run(theirs, refuse_warnings=True)
        except FxmemWarning as warning:
            raise UsageError(str(warning), hint="make the plan for these inputs") from None
        except Exception as error:
            differences = (_describe_error(step, error),)
        else:
            their_times.append(seconds)
            differences = compare_records(step, record, their_record)
    return Comparison(step, record, differences, (tuple(our_times), tuple(their_times)))


def check_repetition(ours: Runner, comparison: Comparison, seed: int) -> tuple[str, ...]:
    """Where models differ, a note if the first one differs from itself just as well.

    To be called with the model in the state from which the comparison began.

    Args:
        ours: Of the first model.
        comparison: With the second.
        seed: That of the comparison.
    """
    if not comparison.differences or not comparison.runs:
        return ()
    ours.prepare()
    seed_random_numbers(seed)
    record: Record = {}
    for _ in range(comparison.steps):
        record, _seconds = _run_first(ours)
    differences = compare_records(comparison.steps, comparison.record, record)
    if not differences:
        return ()
    first = differences[0]
    return (
        "The model is not deterministic: run again from the same state, it differs from itself "
        f"({first.kind.value} {first.name}).",
    )


def _run(runner: Runner, *, refuse_warnings: bool = False) -> tuple[Record, float]:
    with warnings.catch_warnings():
        if refuse_warnings:
            warnings.simplefilter("error", FxmemWarning)
        output, loss, seconds = runner.run()
    record = runner.record(output, loss)
    runner.release()
    return record, seconds


def _run_first(runner: Runner) -> tuple[Record, float]:
    try:
        return _run(runner)
    except FxmemError:
        raise
    except Exception as error:
        raise TraceError(f"the model's step fails: {_explain(error)}", hint=_HINT) from error


def _describe_error(step: int, error: Exception) -> Difference:
    return Difference(step, Kind.ERROR, "step", _explain(error))


def _explain(error: Exception) -> str:
    where = find_raising_source(error)
    return summarize_error(error) + (f" at {where}" if where else "")


def _copy_values(ours: Runner, theirs: Runner) -> None:
    """Gives parameters and buffers that are not shared the first model's values."""
    for kind in ("parameters", "buffers"):
        values: dict[str, Any] = dict(getattr(ours.model, f"named_{kind}")())
        name: str
        tensor: Tensor
        for name, tensor in getattr(theirs.model, f"named_{kind}")():
            if tensor is not values[name]:
                with torch.no_grad():
                    tensor.copy_(values[name])
