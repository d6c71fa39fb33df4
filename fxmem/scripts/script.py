"""A training script, run unchanged on fake tensors until some steps are recorded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fxmem.analyzing import find_settings
from fxmem.errors import FxmemError, TraceError
from fxmem.scripts.launchers import Launcher
from fxmem.scripts.script_run import Progress, ScriptRun
from fxmem.scripts.session import EnoughSteps, Session
from fxmem.training.failures import explain_failure
from fxmem.training.options import resolve_options


def run_script(
    script: str,
    arguments: Sequence[str] = (),
    *,
    is_module: bool = False,
    steps: int | None = None,
    alloc_conf: str | None = None,
    world_size: int | None = None,
    rank: int = 0,
    progress: Progress | None = None,
    **options: Any,
) -> ScriptRun:
    """Runs a script as ``python`` does and records its steps: :func:`fxmem.run`.

    With ``progress``, which says meanwhile how far it is, Ctrl-C ends the script like its last step
    once there is one.
    """
    launcher = Launcher(rank, world_size)
    chosen = resolve_options(**options)
    session = Session(chosen, steps, launcher, find_settings(chosen.target.name, alloc_conf))
    if progress is not None:
        progress.describe = session.describe_progress
    with session.watch():
        try:
            launcher.launch([*(("python", "-m") if is_module else ()), script, *arguments])
        except EnoughSteps:
            pass
        except KeyboardInterrupt:
            if progress is None or not session.windows:
                raise
            return session.describe(partial=True)
        except SystemExit as error:
            if error.code not in (None, 0) and not session.windows:
                raise TraceError(
                    f"{launcher.script} ended with exit code {error.code!r} before a step",
                    hint="give its arguments after its name"
                    if error.code == 2  # as argparse
                    else "its own output says why",
                ) from error
        except Exception as error:
            if not session.is_done:
                if isinstance(error, FxmemError):
                    raise
                raise _explain(error, launcher.script, chosen.size_hint is not None) from error
        session.end()
    launcher.check_place()
    return session.describe()


def _explain(error: Exception, script: str, has_size_hint: bool) -> FxmemError:
    explained = explain_failure(error, None, has_size_hint)
    if isinstance(explained, TraceError) and explained.cause.startswith("the step failed"):
        cause = re.sub(r"\x1b\[[0-9;]*m", "", explained.cause.removeprefix("the step failed"))
        return TraceError(f"{script} failed{cause}", explained.hint)
    return explained
