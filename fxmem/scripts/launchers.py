"""Launchers of training processes, of which the process that runs becomes one.

A launcher's own program parses its command line and prepares the environment. Where it would start
processes, the work of one rank begins in this process instead; no other rank is started.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from multiprocessing import get_start_method
from multiprocessing.process import BaseProcess
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch.multiprocessing
from torch import distributed as dist

from fxmem.errors import UsageError
from fxmem.fakes.fake_mode import holds_fakes
from fxmem.parallelism.process_group import be_rank
from fxmem.patching import change_items, patch
from fxmem.source import find_source, is_fxmem, is_user_file

_SETTING = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_PYTHON = re.compile(r"python[\d.]*")
_OPTIONS_WITH_VALUE = ("-W", "-X")
_PROGRAMS = {
    "accelerate.commands.launch": "accelerate-launch",
    "torch.distributed.run": "torchrun",
}
"""Modules that are run with ``-m``, by the name of the program that is the same."""
_ASKERS: dict[str, Callable[[Mapping[str, Any]], int | None]] = {
    "_sanitize_gpu_ids": lambda values: 1 + max(values["gpus"], default=0),  # of Lightning
    "_validate_launch_command": lambda values: values["args"].num_processes,  # of accelerate
}
"""Functions that look for the GPUs that they are told to use, and for their number."""
_MOST_FRAMES = 8


class Launcher:
    """Runs command lines in this process, which is one of the processes that they start.

    Attributes:
        script: The name of the script, module or program that was begun last.
    """

    def __init__(self, rank: int = 0, world_size: int | None = None) -> None:
        if world_size is not None:
            _check_rank(rank, world_size)
        self.script = ""
        self._rank = rank
        self._world_size = world_size
        self._gpus = 1
        self._started = 0  # of the processes that join a group
        self._is_placed = rank == 0 or world_size is not None

    # -- command lines -------------------------------------------------------------------------

    def launch(self, words: Sequence[str]) -> None:
        """Runs a command line while what starts processes is replaced.

        Raises:
            UsageError: It begins neither with a script nor with a program in Python.
        """
        with self.take_place():
            self._run(words)

    @contextlib.contextmanager
    def take_place(self) -> Iterator[None]:
        """Is the process of a rank within, and starts no others."""
        spawning = sys.modules["torch.multiprocessing.spawn"]
        replacements: dict[Any, dict[str, Any]] = {
            spawning: {"start_processes": self._spawn},
            torch.multiprocessing: {"start_processes": self._spawn},
            BaseProcess: {"start": self._replace_start(BaseProcess.start)},
            subprocess.Popen: {"__init__": _replace_popen(subprocess.Popen.__init__)},
            warnings: {"showwarning": _replace_showwarning(warnings.showwarning)},
        }
        if dist.is_available():
            api = importlib.import_module("torch.distributed.launcher.api")
            replacements[api] = {"launch_agent": self._launch_agent}
        size = self._world_size
        place = contextlib.nullcontext() if size is None else be_rank(self._rank, size)
        with change_items(os.environ), _offer_programs(), patch(replacements), place:
            yield

    def check_place(self) -> None:
        """Checks that some launcher has started a process of the rank.

        Raises:
            UsageError: None has.
        """
        if not self._is_placed:
            raise UsageError(
                f"{self.script} started no process of rank {self._rank}",
                hint="say how many there are: --world-size N",
            )

    def count_gpus(self) -> int:
        """Counts the GPUs of a node: as many as its processes, or as a library is told to use."""
        frame = sys._getframe(1)
        for _ in range(_MOST_FRAMES):
            if asker := _ASKERS.get(frame.f_code.co_name):
                self._gpus = max(self._gpus, asker(frame.f_locals) or 1)
            if frame.f_back is None:
                break
            frame = frame.f_back
        return max(self._gpus, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))

    def _run(self, words: Sequence[str]) -> None:
        settings = [*itertools.takewhile(_SETTING.fullmatch, words)]
        program, *arguments = words[len(settings) :] or [""]
        name = os.path.basename(program)
        with change_items(os.environ, dict(word.split("=", 1) for word in settings)):
            if _PYTHON.fullmatch(name):
                while arguments and arguments[0].startswith("-") and arguments[0] != "-m":
                    del arguments[: 2 if arguments[0] in _OPTIONS_WITH_VALUE else 1]
                if arguments[:1] != ["-m"]:
                    self._run_script(arguments[0] if arguments else "", arguments[1:])
                    return
                program, *arguments = arguments[1:] or [""]
                name = _PROGRAMS.get(program, "")
            if name == "deepspeed" or program.split(".")[0] == "deepspeed":
                raise UsageError(
                    "DeepSpeed is not analysed: its engine flattens parameters by its own kernels",
                    hint="fully_shard, in a script under torchrun, holds what ZeRO-3 holds",
                )
            if entry := _find_program(program, name):
                self._run_program(entry, arguments)
            elif program == words[len(settings)]:
                self._run_script(program, arguments)
            else:
                self._run_module(program, arguments)

    def _run_script(self, path: str, arguments: Sequence[str]) -> None:
        if not os.path.exists(path):
            raise UsageError(
                f"no script {path!r}",
                hint="fxmem run train.py; -m package.module; or a line that begins with python, "
                "torchrun or accelerate launch",
            )
        folder = os.path.dirname(os.path.abspath(path))
        with self._begin(path, arguments, folder):
            runpy.run_path(path, run_name="__main__")

    def _run_module(self, name: str, arguments: Sequence[str]) -> None:
        with self._begin(name, arguments, os.getcwd()):
            runpy.run_module(name, run_name="__main__", alter_sys=True)

    def _run_program(self, entry: metadata.EntryPoint, arguments: Sequence[str]) -> None:
        with self._begin(entry.name, arguments, None), contextlib.ExitStack() as stack:
            main = entry.load()
            if accelerate := sys.modules.get("accelerate.commands.launch"):

                def launch_simply(options: Any) -> None:
                    words, variables = accelerate.prepare_simple_launcher_cmd_env(options)
                    with change_items(os.environ, variables):
                        self._run(words)

                stack.enter_context(patch({accelerate: {"simple_launcher": launch_simply}}))
            main()

    @contextlib.contextmanager
    def _begin(self, path: str, arguments: Sequence[str], folder: str | None) -> Iterator[None]:
        self.script = os.path.basename(path)
        folders = [] if folder is None else [folder]
        with patch({sys: {"argv": [path, *arguments], "path": [*folders, *sys.path]}}):
            yield

    # -- what starts processes -----------------------------------------------------------------

    def _take_place(self, count: int) -> int:
        _check_rank(self._rank, count)
        self._is_placed = True
        return self._rank

    def _launch_agent(self, config: Any, entrypoint: Any, args: Any, **_: Any) -> Any:
        """Runs what ``torchrun`` runs in each process: a function, or a command."""
        from torch.distributed.elastic.utils.api import macros

        size = config.nproc_per_node * config.min_nodes
        rank = self._take_place(size)
        names = {"ROLE_NAME": config.role, "TORCHELASTIC_RUN_ID": config.run_id}
        restarts = {"TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts)}
        with be_rank(rank, size, config.nproc_per_node, **names, **restarts):
            arguments = macros.substitute([*args], os.environ["LOCAL_RANK"])
            if callable(entrypoint):
                return {rank: entrypoint(*arguments)}
            self._run([entrypoint, *arguments])
        return {rank: None}

    def _spawn(
        self, fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any
    ) -> Any:
        fn(self._take_place(nprocs), *args)
        return None if join else SimpleNamespace(processes=[], join=lambda *_, **__: True)

    def _replace_start(self, start: Callable[[Any], None]) -> Callable[[Any], None]:
        def start_or_be(process: Any) -> None:
            method = process._start_method or get_start_method()
            # A model on the GPU can be shared with a process that begins afresh: it trains.
            shares = method == "spawn" and holds_fakes((process._args, process._kwargs))
            if not (shares or _joins_group(process._target or process.run)):
                start(process)
                return
            ended = dict.fromkeys(("poll", "wait", "terminate", "kill", "close"), lambda *_: 0)
            process._popen = SimpleNamespace(pid=os.getpid(), returncode=0, **ended)
            self._started += 1
            if self._started == self._rank + 1:
                self._is_placed = True
                process.run()

        return start_or_be


@contextlib.contextmanager
def _offer_programs() -> Iterator[None]:
    """Has a program ``nvidia-smi`` where a GPU is shown; scripts log what it prints: nothing."""
    if shutil.which("nvidia-smi") or not torch.cuda.is_available():
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "nvidia-smi")
        with open(program, "w") as file:
            file.write("#!/bin/sh\n")
        os.chmod(program, 0o755)
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), folder])
        yield


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise UsageError(
            f"no rank {rank} of {world_size} processes", hint="--world-size 8 --rank 0"
        )


def _find_program(path: str, name: str) -> metadata.EntryPoint | None:
    """Finds the program of an installed package, as ``torchrun`` is; a file here goes first."""
    if not name or name.endswith(".py") or (path == name and os.path.isfile(path)):
        return None
    return next(iter(metadata.entry_points(group="console_scripts", name=name)), None)


def _joins_group(function: Any, seen: frozenset[Any] = frozenset()) -> bool:
    """Returns whether a function of the user's, or one that it names, joins a process group."""
    if isinstance(function, MethodType):
        function = function.__func__
    if not isinstance(function, FunctionType) or function in seen:
        return False
    code = function.__code__
    if not is_user_file(code.co_filename):
        return False
    if "init_process_group" in code.co_names:
        return True
    named = [function.__globals__.get(name) for name in code.co_names]
    for module in [value for value in named if isinstance(value, ModuleType)]:
        named += [vars(module).get(name) for name in code.co_names]
    return any(_joins_group(value, seen | {function}) for value in named)


def _replace_showwarning(show: Callable[..., None]) -> Callable[..., None]:
    """Has warnings of PyTorch's C++ show the script's line, not fxmem's that runs the operator."""

    def showwarning(
        message: Any, category: Any, filename: str, lineno: int, *rest: Any, **options: Any
    ) -> None:
        source = find_source() if is_fxmem(filename) else None
        place = (filename, lineno) if source is None else (source.file, source.line)
        show(message, category, *place, *rest, **options)

    return showwarning


def _replace_popen(init: Callable[..., None]) -> Callable[..., None]:
    def __init__(popen: Any, args: Any, *rest: Any, **options: Any) -> None:
        variables: Mapping[str, str] = options.get("env") or {}
        if variables.get("LOCAL_RANK", "0") == os.environ.get("LOCAL_RANK", "0"):
            init(popen, args, *rest, **options)
            return
        popen.args, popen.pid, popen.returncode = args, os.getpid(), 0  # of another rank: no more
        popen.stdin = popen.stdout = popen.stderr = None

    return __init__
