"""A training script, run unchanged on fake tensors until some steps are recorded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fxmem.errors import FxmemError, TraceError, UsageError
from fxmem.recording.size_hints import SizeHint
from fxmem.scripts.generation import limit_generation
from fxmem.scripts.launchers import Launcher
from fxmem.scripts.script_run import Progress, Read, ScriptRun
from fxmem.scripts.session import Session
from fxmem.scripts.windows import EnoughSteps, Windows
from fxmem.source import find_raising_source
from fxmem.training.failures import explain_failure
from fxmem.training.options import resolve_compilation, resolve_device

UNTIL = ("evaluation", "save", "epoch")
"""Parts of a script that come after steps."""

_OF_NUMBERS = (ArithmeticError, ValueError)
"""Errors that stand-ins for values may lead to."""


def run(
    script: str,
    arguments: Sequence[str] = (),
    *,
    is_module: bool = False,
    steps: int | None = None,
    until: str | int | None = None,
    fullest: bool = False,
    device: str = "cuda",
    gpu: str | None = None,
    reserve: str | int | None = None,
    attention: str | None = None,
    alloc_conf: str | None = None,
    size_hint: SizeHint = None,
    routing: str | Sequence[float] = "balanced",
    new_tokens: int | None = None,
    compile: bool = True,
    activation_memory_budget: float | None = None,
    world_size: int | None = None,
    rank: int = 0,
    progress: Progress | None = None,
) -> ScriptRun:
    """Runs a training script as it is, and measures the memory of its steps.

    ``torch.cuda`` answers as on a machine with one GPU. What the script puts there becomes fake
    tensors, which have no memory; operators on them are recorded and compute nothing. Everything
    else is real: data sets, loaders, files. Reading a fake tensor's value, such as a loss, returns
    1; an assertion gets the answer that passes. The script ends when all of its optimizers have
    stepped so many times; where it compiles, after another step, which runs eagerly and is compared
    in a note.

    Args:
        script: The path of a script, the name of a module, or a program that starts one, as
            ``torchrun`` does.
        arguments: Its arguments.
        is_module: Whether ``script`` names a module, as for ``python -m``.
        steps: How many steps to record; by default three, or two of more than 100,000 operators.
        until: ``"evaluation"`` to go on until the script has evaluated its model, too, ``"save"``
            until it has saved; ``"epoch"`` for the end of a loader that the steps draw from; or a
            number of steps. Of steps after
            the ones that are recorded, larger ones are kept.
        fullest: Whether to read the loader that the steps draw from to its end, without a model,
            and give them its largest batches.
        device: ``"cuda"``; or ``"cpu"``, for a script that finds no GPU and trains on the CPU.
        gpu: As for :func:`analyze`.
        reserve: As for :func:`analyze`.
        attention: As for :func:`analyze`.
        alloc_conf: As for :func:`analyze`.
        size_hint: How many elements ``nonzero``, boolean masks and the like find; None for all.
        routing: As for :func:`analyze`.
        new_tokens: After how many tokens transformers' ``generate`` ends a text; None for as many
            as the script allows.
        compile: Whether the script's own ``torch.compile`` compiles: PyTorch's compiler decides
            what the step holds. False for eager figures.
        activation_memory_budget: As for :func:`analyze`.
        world_size: The number of processes, as ``torchrun --nproc-per-node`` starts them; the
            others need not be there. None for as many as the script starts.
        rank: The one of them that runs.
        progress: Is told how far the script is; Ctrl-C then ends it like its last step, once there
            is one.

    Raises:
        UsageError: There is no such script, or an argument is not understood.
        TraceError: The script fails, or ends before a step.
    """
    launcher = Launcher(rank, world_size)
    options = resolve_device(device, gpu, attention, alloc_conf, size_hint, reserve, routing)
    chosen = resolve_compilation(None if compile else False, activation_memory_budget)
    options = replace(options, compilation=chosen)
    if until not in (None, *UNTIL) and not isinstance(until, int):
        raise UsageError(f"--until {until}: write {', '.join(UNTIL)} or a number of steps")
    windows = Windows(steps, until=until, adds_eager_step=True)
    session = Session(options, windows, launcher, takes_fullest=fullest)
    if progress is not None:
        progress.describe = session.describe_progress
    try:
        with session.watch(), limit_generation(new_tokens):
            _launch(
                session, launcher, [*(("python", "-m") if is_module else ()), script, *arguments]
            )
            session.end()
    except KeyboardInterrupt:
        if progress is None or not session.windows.steps:
            raise
        return session.describe(partial=True)
    except Exception as error:
        if progress is not None and session.windows.steps:
            progress.recorded = session.describe(partial=True)
        if isinstance(error, FxmemError):
            raise
        raise _explain(
            error, launcher.script, size_hint is not None, session.list_reads()
        ) from error
    launcher.check_place()
    return session.describe()


def _launch(session: Session, launcher: Launcher, command: Sequence[str]) -> None:
    """Runs a script until it ends, or has the steps that were asked for."""
    try:
        launcher.launch(command)
    except EnoughSteps:
        pass
    except SystemExit as error:
        if error.code not in (None, 0) and not session.windows.steps:
            raise TraceError(
                f"{launcher.script} ended with exit code {error.code!r} before a step",
                hint="give its arguments after its name"
                if error.code == 2  # as argparse
                else "its own output says why",
            ) from error
    except Exception:
        if not session.windows.is_done:
            raise


def _explain(
    error: Exception, script: str, has_size_hint: bool, reads: Iterable[Read]
) -> FxmemError:
    explained = explain_failure(error, None, has_size_hint)
    if isinstance(explained, TraceError) and explained.cause.startswith("the step failed"):
        cause = re.sub(r"\x1b\[[0-9;]*m", "", explained.cause.removeprefix("the step failed"))
        where, hint = find_raising_source(error), explained.hint
        at = (where.file, where.line) if where is not None else None
        values = [read.value for read in reads if (read.source.file, read.source.line) == at]
        if values and isinstance(error, _OF_NUMBERS):
            told = f"values read there are not known, and were taken as {values[0]}"
            hint = f"{told}; {hint}" if hint else told
        return TraceError(f"{script} failed{cause}", hint)
    return explained
