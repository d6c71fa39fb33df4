"""The page of the corpus: what became of each script, and steps beside real ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.script_corpus.launches import COMMITS, LAUNCHES, Launch
from benchmarks.script_corpus.runner import Outcome

_FAST_S = 60
_LINE = 160
"""Characters of a refusal that are shown."""


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
    for kind in dict.fromkeys(launch.kind for launch in launches):
        rows = [_describe(each, found[each.name]) for each in launches if each.kind == kind]
        parts.append(f"## {kind[0].upper()}{kind[1:]}")
        parts.append(_tabulate(("script", "largest step, MiB", "s"), rows))
    printed = [
        (launch.name, *map(_list_sizes, (outcome.printed, outcome.peaks)))
        for launch in reports
        if (outcome := found[launch.name]).printed
    ]
    if printed:
        parts.append("## Peaks that scripts print")
        parts.append(
            "`torch.cuda.max_memory_allocated()` after a step, as these scripts print it, beside "
            "the steps of the report. Where a script does not reset the counter, it prints the "
            "highest peak so far."
        )
        parts.append(_tabulate(("script", "prints, MiB", "the report's steps, MiB"), printed))
    edits = [
        (launch.name, name, _code(old), _code(new))
        for launch in launches
        for name, old, new in launch.edits
    ]
    parts += ["## Edits", _tabulate(("script", "file", "text", "instead"), edits)]
    return "\n\n".join([*parts, *_compare(launches, found)]) + "\n"


def _describe(launch: Launch, outcome: Outcome) -> tuple[str, ...]:
    commit = COMMITS[launch.repository]
    link = f"[{launch.repository}](https://github.com/{launch.repository}/tree/{commit}) {commit}"
    command = f"{launch.options} {launch.command}".strip()
    result = f"{max(outcome.peaks) / 2**20:,.1f}" if outcome.peaks else outcome.line
    return (
        f"{link}: `{command}`",
        result.removeprefix("fxmem: error: ")[:_LINE],
        f"{outcome.seconds:.0f}",
    )


def _list_sizes(sizes: Sequence[float]) -> str:
    return ", ".join(f"{size / 2**20:,.1f}" for size in sizes)


def _compare(launches: Sequence[Launch], found: Mapping[str, Outcome]) -> list[str]:
    rows = []
    for launch in launches:
        pairs = list(zip(*(found[launch.name].measured or ((), ())), strict=False))
        errors = [said / real - 1 for real, said in pairs]
        if pairs:
            shown = ", ".join(f"{100 * error:+.3f}" if error else "0" for error in errors)
            cause = launch.cause if max(map(abs, errors)) > 0.005 else ""
            largest = (f"{max(peaks):,}" for peaks in zip(*pairs, strict=True))
            rows.append((launch.name, *largest, shown, cause))
    text = (
        f"{len(rows)} of the scripts ran on the CPU under PyTorch's profiler until their "
        "optimizers had stepped three times, and then under `fxmem run --device cpu`, in "
        "processes of their own. Compared are the peaks of all steps, in bytes of the "
        "allocator's events. [Earlier comparisons](script_steps.md) have other scripts."
    )
    header = ("script", "largest, measured", "fxmem", "each step differs by, %", "cause")
    return ["## Steps beside real ones", text, _tabulate(header, rows)]


def _tabulate(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [
        header,
        ["-"] * len(header),
        *([cell.replace("|", "/") for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(text: str) -> str:
    return f"`{' '.join(text.split())}`" if text else ""
