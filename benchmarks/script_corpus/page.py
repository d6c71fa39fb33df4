"""The page of the corpus: what became of each script, and steps beside real ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tabulate import tabulate

from benchmarks.script_corpus.launches import COMMITS, LAUNCHES, Launch
from benchmarks.script_corpus.runner import Outcome

_FAST_S = 60


def write_page(found: Mapping[str, Outcome], stamp: str) -> str:
    """Returns the page on the launches that have an outcome."""
    launches = [launch for launch in LAUNCHES if launch.name in found]
    reports = [launch for launch in launches if found[launch.name].peaks]
    fast = [launch for launch in reports if found[launch.name].seconds < _FAST_S]
    repositories = {launch.repository for launch in launches}
    parts = [
        "# Training scripts",
        stamp,
        f"{len(launches)} scripts of {len(repositories)} public repositories, run with `fxmem run` "
        f"as their authors wrote them: {len(reports)} give a report, {len(fast)} of them in less "
        f"than {_FAST_S} s. Data sets, tokenizers and weights that would be downloaded are made "
        "up, models and batches smaller where the script has an option for that. Where a script "
        "asks for the internet in its code, or a library has changed since, the edit is shown. "
        "Times are of the whole command, of one thread, in seconds of the CPU.",
    ]
    kinds = list(dict.fromkeys(launch.kind for launch in launches))
    for kind in kinds:
        rows = [_describe(launch, found[launch.name]) for launch in launches if launch.kind == kind]
        parts.append(f"## {kind[0].upper()}{kind[1:]}")
        header = ["script", "largest step, MiB", "s"]
        parts.append(tabulate(rows, header, tablefmt="github", disable_numparse=True))
    edits = [f"| {launch.name} | {name} | {_code(old)} | {_code(new)} |"
             for launch in launches for name, old, new in launch.edits]  # fmt: skip
    parts += [
        "## Edits",
        "\n".join(["| script | file | text | instead |", "| - | - | - | - |", *edits]),
    ]
    parts += ["## Steps beside real ones", *_compare(launches, found)]
    return "\n\n".join(parts) + "\n"


def _describe(launch: Launch, outcome: Outcome) -> tuple[str, str, str]:
    commit = COMMITS[launch.repository]
    link = f"[{launch.repository}](https://github.com/{launch.repository}/tree/{commit})"
    options = f"{launch.options} " if launch.options else ""
    script = f"{link} {commit}: `{options}{launch.command}`".replace("|", "\\|")
    result = f"{max(outcome.peaks) / 2**20:,.1f}" if outcome.peaks else _cell(outcome.line)
    return script, result, f"{outcome.seconds:.0f}"


def _compare(launches: Sequence[Launch], found: Mapping[str, Outcome]) -> list[str]:
    rows = []
    for launch in launches:
        outcome = found[launch.name]
        for step, (real, said) in enumerate(zip(*(outcome.measured or ((), ())), strict=False), 1):
            error = f"{100 * (said / real - 1):+.3f} %" if said != real else "0"
            cause = launch.cause if abs(said / real - 1) > 0.005 else ""
            rows.append((launch.name, step, f"{real:,}", f"{said:,}", error, cause))
    header = ["script", "step", "measured", "fxmem", "differs by", "cause"]
    text = (
        "The real script ran on the CPU under PyTorch's profiler, and then under "
        "`fxmem run --device cpu`, in processes of their own: peaks of steps, in bytes."
    )
    return [text, tabulate(rows, header, tablefmt="github", disable_numparse=True)]


def _code(text: str) -> str:
    return f"`{' '.join(text.split())}`".replace("|", "\\|") if text else ""


def _cell(line: str) -> str:
    return line.removeprefix("fxmem: error: ").replace("|", "/")
