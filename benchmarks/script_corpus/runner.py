"""One launch of the corpus: a copy of its sources, its data, ``fxmem run``, the real script."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.script_corpus.data import MAKERS
from benchmarks.script_corpus.launches import COMMITS, Launch

_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "MPLBACKEND": "Agg",
    "TOKENIZERS_PARALLELISM": "false",
}


class Data(dict[str, str]):
    """Folders of made-up data by name, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        stubs = Path(__file__).parent / "stubs"
        super().__init__(here=str(folder), stubs=str(stubs))
        self.folder = folder

    def __missing__(self, name: str) -> str:
        path = self.folder / name
        if not path.exists():
            MAKERS[name](path)
        self[name] = str(path)
        return self[name]


@dataclass(frozen=True)
class Outcome:
    """What ``fxmem run`` said of a launch.

    Attributes:
        peaks: The peak of each step, in bytes; none if there is no report.
        seconds: What the command took of the CPU.
        printed: The peaks that the script printed after its steps, in bytes.
        line: The line of the refusal; empty where there is a report.
        measured: The peaks under the profiler, and those of ``--device cpu``; none if not asked.
        output: What the script and fxmem wrote.
    """

    peaks: Sequence[int] = ()
    seconds: float = 0.0
    line: str = ""
    measured: tuple[Sequence[int], Sequence[int]] | None = None
    printed: Sequence[float] = ()
    output: str = field(default="", repr=False)


def find_sources(launch: Launch, sources: Path) -> Path | None:
    """Returns the repository's folder below `sources`, if it is there at the right commit."""
    folder = sources / launch.repository.partition("/")[2]
    if not folder.is_dir():
        return None
    commit = folder / "COMMIT"
    if commit.exists():
        found = commit.read_text().split()[0]
    else:
        command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return folder if found.startswith(COMMITS[launch.repository]) else None


def prepare(launch: Launch, source: Path, data: Data, copy: Path) -> None:
    """Copies the sources, edits them, and puts the data in their places."""
    ignore = shutil.ignore_patterns(".git", "*.ipynb")
    shutil.copytree(source, copy, symlinks=True, ignore=ignore)
    for name, old, new in launch.edits:
        text = (copy / name).read_text()
        if old not in text:
            raise ValueError(f"{launch.name}: {name} has no {old!r}")
        (copy / name).write_text(text.replace(old, new.format_map(data)))
    for name, target in launch.place.items():
        path = copy / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.symlink_to(target.format_map(data))


def run_launch(launch: Launch, source: Path, data: Data, timeout_s: float) -> Outcome:
    """Runs a launch under ``fxmem run``, in a copy of the sources."""
    with tempfile.TemporaryDirectory(prefix="corpus_") as temporary:
        result = Path(temporary) / "result.json"
        options = ["--json", "-o", str(result), *shlex.split(launch.options)]
        command = ["-m", "fxmem", "run", *options, *shlex.split(launch.command.format_map(data))]
        output, seconds, ended = _run(command, launch, source, data, timeout_s, Path(temporary))
        if result.exists():
            report = json.loads(result.read_text())
            peaks = [step["peak_bytes"] for step in report["script"]["steps"]]
            pattern, unit = launch.prints
            found = re.findall(pattern, output) if pattern else ()
            printed = [float(each) * unit for each in found]
            return Outcome(peaks, seconds, printed=printed, output=output)
    lines = re.findall("fxmem: error.*", output)
    line = (lines or output.splitlines() or [""])[-1]
    line = line if ended else f"no end in {timeout_s:.0f} s"
    return Outcome((), seconds, line, output=output)


def measure_launch(
    launch: Launch, source: Path, data: Data, outcome: Outcome, timeout_s: float
) -> Outcome:
    """Runs the real script on the CPU, and then ``fxmem run --device cpu``."""
    measured = []
    for what in ("real", "cpu"):
        with tempfile.TemporaryDirectory(prefix="corpus_") as temporary:
            script = shlex.split(f"{launch.command} {launch.cpu}".format_map(data))
            command = ["-m", "benchmarks.scripts", "--only", what, *script]
            output, _, _ = _run(command, launch, source, data, 3 * timeout_s, Path(temporary))
        last = (output.splitlines() or [""])[-1]
        measured.append(json.loads(last) if last.startswith("[") else [])
        if not measured[-1]:
            print(output[-500:], file=sys.stderr)
    return replace(outcome, measured=(measured[0], measured[1]))


def _run(
    command: list[str], launch: Launch, source: Path, data: Data, timeout_s: float, where: Path
) -> tuple[str, float, bool]:
    copy = where / source.name
    prepare(launch, source, data, copy)
    folder = copy / launch.folder
    root = str(Path(__file__).parents[2])
    paths = [root, *(str(folder / path) for path in launch.paths)]
    env = {**os.environ, **_OFFLINE, "PYTHONPATH": os.pathsep.join(paths)}
    env["HF_HOME"] = data["here"] + "/hf"
    env |= {name: value.format_map(data) for name, value in launch.env.items()}
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.Popen(
            [sys.executable, *command], cwd=folder, env=env, stdout=file, stderr=file,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            done.wait(timeout_s)
            ended = True
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, signal.SIGKILL)
            done.wait()
            ended = False
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        file.seek(0)
        return file.read(), seconds, ended
