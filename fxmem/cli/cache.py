"""Results of earlier checks, kept as long as nothing that they were computed from changes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import fxmem
from fxmem.cli.configuration import FILE, Check
from fxmem.graph import is_installed

FOLDER = ".fxmem_cache"
_UNUSED = ("operations", "saved", "timeline")
"""Parts of a report, and most of its bytes, that a check does not look at."""
_LARGEST_BYTES = 1 << 22
"""Of a larger file, data that a module opens, size and time have to do."""
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")
_opened: set[str] | None = None
"""Files opened for reading while somebody watches; a hook of the interpreter stays for good."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is kept of a check.

    Attributes:
        report: Its last report, without parts that no check looks at.
        fitting: The last one before that was within the budget; None if there is none.
        holds: Whether nothing that the report was computed from has changed since.
    """

    report: dict[str, Any]
    fitting: dict[str, Any] | None
    holds: bool = True


class ResultCache:
    """Reports of checks in a folder beside pyproject.toml, in a file for each check.

    A report holds as long as its key (the versions of everything installed, the machine, the
    options) and the user's own files: the modules that the analysis imported from outside of
    site-packages, and the project's files that it read.
    """

    def __init__(self, project: str) -> None:
        self.project = project
        self.folder = os.path.join(project, FOLDER)
        settings = [os.environ.get(name) for name in (*_SETTINGS, "OMP_NUM_THREADS")]
        machine = [sys.version, platform.machine(), os.cpu_count(), project]
        self.key = _digest(json.dumps([fxmem.__version__, *settings, *machine, *_list_installed()]))

    def read(self, check: Check) -> Entry | None:
        """Reads what is kept of a check."""
        try:
            with open(self._find(check), encoding="utf-8") as file:
                kept = json.load(file)
            holds = kept["key"] == self.key and all(
                _digest_file(os.path.join(self.project, path)) == digest
                for path, digest in kept["files"].items()
            )
            return Entry(kept["report"], kept["fitting"], holds)
        except (OSError, ValueError, LookupError, TypeError):  # none yet, or of another fxmem
            return None

    def write(self, check: Check, entry: Entry, files: Iterable[str]) -> None:
        """Keeps the report of a check, computed from these files."""
        digests = {os.path.relpath(path, self.project): _digest_file(path) for path in files}
        kept = {"key": self.key, "files": digests, **asdict(entry)}
        path = self._find(check)
        with contextlib.suppress(OSError):  # where nothing can be written, the next run is slow
            os.makedirs(self.folder, exist_ok=True)
            with open(os.path.join(self.folder, ".gitignore"), "w", encoding="utf-8") as file:
                file.write("*\n")
            with open(f"{path}.{os.getpid()}", "w", encoding="utf-8") as file:
                json.dump(kept, file)
            os.replace(f"{path}.{os.getpid()}", path)

    def _find(self, check: Check) -> str:
        name = _digest(json.dumps([check.step.target, check.options]))[:16]
        return os.path.join(self.folder, f"{name}.json")


@contextlib.contextmanager
def watch_files() -> Iterator[set[str]]:
    """Fills a set, at the end, with the user's own files that were imported or read so far.

    Modules count wherever they are outside of site-packages, other files below the current
    folder.
    """
    global _opened
    if _opened is None:
        _opened = set()
        sys.addaudithook(_note_opened)
    found = set[str]()
    yield found
    own = f"{os.path.realpath(os.getcwd())}{os.sep}"
    found |= {p for p in map(os.path.realpath, _opened) if p.startswith(own)}
    # Of a module that imports on access, only what is there.
    files = (getattr(m, "__dict__", {}).get("__file__") for m in list(sys.modules.values()))
    found |= {os.path.realpath(path) for path in files if isinstance(path, str)}
    library = os.path.realpath(sysconfig.get_path("stdlib"))
    others = (f"{library}{os.sep}", f"{own}{FOLDER}{os.sep}")
    found -= {p for p in found if is_installed(p) or p.startswith(others)}
    found -= {p for p in found if p.endswith((".pyc", FILE)) or not os.path.isfile(p)}


def trim(report: dict[str, Any]) -> dict[str, Any]:
    """Leaves out of a report what no check looks at."""
    return {key: value for key, value in report.items() if key not in _UNUSED}


def _note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None and isinstance(arguments[0], str):
        writes = os.O_WRONLY | os.O_RDWR
        if not arguments[2] & writes:
            _opened.add(os.path.abspath(arguments[0]))


def _list_installed() -> list[str]:
    """Lists installed packages with their versions, and the commits of those without."""
    names = set[str]()
    for folder in sys.path:
        if os.path.isdir(folder):
            for name in os.listdir(folder):
                if name.endswith((".dist-info", ".egg-info")):
                    origin = os.path.join(folder, name, "direct_url.json")
                    names.add(f"{name} {_digest_file(origin)}")
    return sorted(names)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _digest_file(path: str) -> str:
    try:
        status = os.stat(path)
        if status.st_size > _LARGEST_BYTES:
            return f"{status.st_size} {status.st_mtime_ns}"
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""
