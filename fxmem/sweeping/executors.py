"""Executors of other machines: dask's, and submitit's for Slurm."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from fxmem.errors import UsageError


def connect_dask(address: str) -> Executor:
    """Connects to a scheduler of ``dask.distributed``.

    Raises:
        UsageError: The package is not installed, or nothing answers.
    """
    distributed = _import_package("distributed")
    try:
        client = distributed.Client(address, timeout="10s")
    except (OSError, ValueError) as error:
        raise UsageError(f"--scheduler {address}: {error or 'no answer'}") from error
    executor: Executor = client.get_executor()
    return executor


class SubmititExecutor(Executor):
    """Runs functions by an executor of submitit, whose jobs are no futures.

    Args:
        executor: ``submitit.AutoExecutor``, with its parameters updated.
    """

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        job, future = self._executor.submit(fn, *args, **kwargs), Future[Any]()

        def wait() -> None:
            try:
                future.set_result(job.result())
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=wait, daemon=True).start()
        return future


def make_submitit(folder: str) -> Executor:
    """Makes an executor that submits jobs to Slurm, or runs them here where there is none.

    Args:
        folder: The folder of its logs.

    Raises:
        UsageError: The package is not installed.
    """
    submitit = _import_package("submitit")
    executor = submitit.AutoExecutor(folder=folder)
    executor.update_parameters(timeout_min=60)
    return SubmititExecutor(executor)


def _import_package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{name} is not installed", hint=f"pip install 'fxmem[sweeps]', or {name}"
        ) from error
