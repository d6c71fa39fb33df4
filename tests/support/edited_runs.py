"""A model's own code run with one change, as if it were written there."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from suggested_code import write_suggestions
from torch import nn
from torch.nn import functional as F

from benchmarks.planner_measure import watch_allocations
from benchmarks.step import default_loss, tensors_of
from fxmem.graph import Node
from fxmem.planning.plan import DelPoint, InplaceChange, Plan
from fxmem.report.suggestions import Suggestion, suggest_code
from fxmem.tracing.fxgraph import iterate_tensors
from fxmem.tracing.nodes import Call
from fxmem.tracing.tracer import Tracer

Run = Callable[..., Any]


class _Counter:
    """Takes the place of the recording; nothing is recorded."""

    def enter_node(self, index: int) -> None: ...

    def exit_node(self, index: int, result: Any) -> int:
        return 0


def _call(call: Run, module: nn.Module, fqn: str, args: Any, kwargs: Any, *, is_leaf: bool) -> Any:
    return call(module, *args, **kwargs)


class _InPlace(Tracer):
    """Runs a model's own code on real tensors, and one node of it in place.

    The tracer only gives calls their names; it holds no tensor.
    """

    def __init__(self, model: nn.Module, change: InplaceChange) -> None:
        super().__init__(model, _Counter(), symbolic_sizes=False)
        self.change = change
        self.is_done = False
        self.calls = SimpleNamespace(run=_call, hidden=set(), calls=[])  # which looks at values

    def _run_node(self, call: Call) -> Any:
        seen = self._log._occurrences.get(call.name, 0)
        if (f"{call.name}_{seen}" if seen else call.name) != self.change.node:
            return super()._run_node(call)
        self.is_done = True
        module = self.model.get_submodule(call.target) if call.op == "call_module" else None

        def changed(*args: Any, **kwargs: Any) -> Any:
            return self._overwrite(module, args, kwargs)

        return super()._run_node(replace(call, function=changed))

    def _overwrite(self, module: nn.Module | None, args: Any, kwargs: Any) -> Any:
        call = self.change.call
        if module is not None and not call.startswith("torch."):
            assert call == f"{type(module).__name__}(inplace=True)"
            module.inplace = True
            try:
                return module(*args, **kwargs)
            finally:
                module.inplace = False
        if call.startswith("F."):
            function = getattr(F, call.removeprefix("F.").removesuffix("(inplace=True)"))
            given = inspect.signature(function).bind(*args, **kwargs).arguments
            return function(**{**given, "inplace": True})
        kwargs.pop("inplace", None)
        values = [*args, *kwargs.values()]
        overwritten = [
            value
            for value in iterate_tensors(values)
            if (origin := self._log.builder.find_origin(value)) is not None
            and self.nodes[origin.node].name == self.change.overwrites
        ]
        assert len({id(value) for value in overwritten}) == 1
        others = [value for value in values if value is not overwritten[0]]
        return getattr(overwritten[0], call.removeprefix("torch."))(*others)


def run_in_place(model: nn.Module, change: InplaceChange) -> Run:
    """The model with one operation of its own code in place."""

    def run(*args: Any, **kwargs: Any) -> Any:
        tracer = _InPlace(model, change)
        output = tracer.run_model(args, kwargs)
        assert tracer.is_done
        return output

    return run


@contextmanager
def write_deletion(
    nodes: Sequence[Node], point: DelPoint, among: Mapping[str, types.ModuleType] = sys.modules
) -> Iterator[None]:
    """While it lasts, the function that holds a value has the ``del`` that a plan writes there."""
    assert point.source is not None
    path = point.source.file
    text = Path(path).read_text(encoding="utf-8")
    written = write_suggestions(text, _suggest_del(nodes, point))
    function = _find_function(path, point.source.line)
    code = _find_code(compile(written, path, "exec", dont_inherit=True), function.__code__)
    before = function.__code__
    function.__code__ = code
    try:
        yield
    finally:
        function.__code__ = before


def can_be_written(nodes: Sequence[Node], point: DelPoint) -> bool:
    """Tells whether a ``del`` is suggested: none is where other code reads the variable."""
    return bool(point.variable and _suggest_del(nodes, point))


def _suggest_del(nodes: Sequence[Node], point: DelPoint) -> tuple[Suggestion, ...]:
    if point.source is None or not Path(point.source.file).exists():
        return ()
    text = Path(point.source.file).read_text(encoding="utf-8")
    return suggest_code(Plan("", 0, 0, dels=(point,)), nodes, {point.source.file: text})


def _find_function(path: str, line: int) -> Any:
    """The function of a loaded module that has a line."""
    found = []
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) != path:
            continue
        for value in list(vars(module).values()):
            owners = [value, *vars(value).values()] if inspect.isclass(value) else [value]
            for owner in owners:
                function = inspect.unwrap(owner) if callable(owner) else owner
                if not inspect.isfunction(function) or function.__code__.co_filename != path:
                    continue
                lines = [at for *_, at in function.__code__.co_lines() if at is not None]
                if min(lines) <= line <= max(lines):
                    found.append(function)
    assert len({id(f) for f in found}) == 1, (path, line, found)
    return found[0]


def _find_code(code: types.CodeType, like: types.CodeType) -> types.CodeType:
    waiting = [code]
    for candidate in waiting:
        if (candidate.co_name, candidate.co_firstlineno) == (like.co_name, like.co_firstlineno):
            return candidate
        waiting += [const for const in candidate.co_consts if isinstance(const, types.CodeType)]
    raise AssertionError(f"no {like.co_name} in the changed file")


def measure_call(model: nn.Module, run: Run, args: tuple[Any, ...], *, train: bool) -> int:
    """The most bytes that are live in a step, with parameters, buffers and inputs."""
    model.train(train)
    owned = [*model.parameters(), *model.buffers(), *tensors_of(args)]
    resident = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in owned}

    def step() -> None:
        output = run(*args)
        if train:
            default_loss(output).backward()

    with torch.set_grad_enabled(train), watch_allocations() as seen:
        with torch.profiler.record_function("span step"):
            step()
        model.zero_grad(set_to_none=True)
    return sum(resident.values()) + seen.find_peak("span step")
