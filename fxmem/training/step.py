"""A step of a training or of inference, run on fake tensors until it is steady, and recorded."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from fxmem.compiling.compiler import Compilation
from fxmem.graph import MemoryGraph
from fxmem.kernels.registry import Backend
from fxmem.recording.assemble import assemble_graph
from fxmem.recording.recorder import Recorder
from fxmem.recording.size_hints import SizeHints, assume_counts, name_routing
from fxmem.tracing.tracer import Tracer
from fxmem.training.isolation import imitate_target, watch_random_state
from fxmem.training.losses import NoGradientError
from fxmem.training.training import Step, Training


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded step."""

    graph: MemoryGraph  # the memory graph
    fx_graph: fx.Graph  # the traced FX graph, which can be run where ``reason`` is empty
    reason: str  # why the FX graph cannot express the step
    # live bytes after each allocation and free as they were watched, equal to those of the
    # timeline that is computed from ``graph``
    live_bytes: tuple[int, ...]
    notes: tuple[str, ...] = ()  # notes on how the step was run, a sentence each
    # whether autocast casts weights: casts are kept under ``no_grad`` alone
    casts_weights: bool = False
    is_routed: bool = False  # whether the assumed routing of tokens to experts decides anything


def record_step(
    step: Step, target: Backend, *, symbolic_sizes: bool = True, hints: SizeHints | None = None
) -> Recording:
    """Runs a step twice and records the second time, the steady state.

    Must be called with the step's fake mode active.

    Args:
        step: The step.
        target: The device whose kernels run it.
        symbolic_sizes: Whether sizes stay nodes (``fx``), or are numbers (``record``).
        hints: How many elements ``nonzero`` and the like find; None to refuse them.
    """
    recorder = Recorder(target, hints, step.mesh)
    with watch_step(recorder, target, step.compilation) as notes:
        try:
            step = lay_out(step, recorder)
            if step.compilation is not None and step.compilation.model is not None:
                _compile_in_place(step.model, step.compilation.model)
            tracer = Tracer(
                step.model,
                recorder,
                symbolic_sizes=symbolic_sizes,
                builds_graph=step.parallelize is None,
            )
            recorder.add_node = tracer.add_compiled
            first_change = Training(step, target, recorder, tracer).run_loop()
            builder = tracer.builder
            return Recording(
                assemble_graph(recorder, tracer.nodes, tracer.calls),
                fx.Graph() if builder is None else builder.graph,
                (builder and builder.reason) or first_change or _explain_randomness(recorder),
                tuple(recorder.ledger.live_bytes),
                notes=(*note_assumptions(recorder), *notes),
                casts_weights=recorder.casts.casts_weights,
                is_routed=bool(recorder.runner.routings),
            )
        except NoGradientError as error:
            if not recorder.runner.draws:
                raise
            raise NoGradientError(
                " ".join((f"{error.cause}.", *_note_draws(recorder))).removesuffix("."),
                hint="a layer that is dropped with a probability below 0.5 is kept",
            ) from error
        finally:
            recorder.real_tensors.restore_gradients()


def _compile_in_place(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Compiles a model as ``torch.compile`` does, of which Dynamo takes a container for a frame.

    ``Module.compile`` leaves those of ``torch.nn`` alone; see ``OptimizedModule._initialize`` in
    ``torch/_dynamo/eval_frame.py``.
    """
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    if not rules.check(model.forward):
        model.compile(**options)
        return
    external: Any = importlib.import_module("torch._dynamo.external_utils")
    model._compiled_call_impl = torch.compile(external.wrap_inline(model._call_impl), **options)


def trace_forward(
    step: Step, target: Backend, *, hints: SizeHints | None = None
) -> tuple[fx.Graph, str]:
    """Traces the forward of a step, once, and records nothing; arguments as for `record_step`.

    Returns:
        The FX graph, and what it cannot express.
    """
    recorder = Recorder(target, hints)
    with watch_step(recorder, target):
        tracer = Tracer(step.model, recorder, symbolic_sizes=True, builds_graph=True)
        Training(step, target, recorder, tracer).trace_forward()
        assert tracer.builder is not None
        return tracer.builder.graph, tracer.builder.reason or _explain_randomness(recorder)


@contextlib.contextmanager
def watch_step(
    recorder: Recorder, target: Backend, compilation: Compilation | None = None
) -> Iterator[Mapping[str, None]]:
    """Records a step of the analysis's own as on the target; yields notes as `imitate_target`."""
    with (
        imitate_target(recorder, target, compilation) as notes,
        watch_random_state(recorder),
        assume_counts(recorder.runner.hints, recorder.notes),
        recorder,
    ):
        yield notes


def note_assumptions(recorder: Recorder) -> Iterator[str]:
    """Notes what a step was taken to do where values decide, a sentence each."""
    yield from recorder.notes
    yield from _note_draws(recorder)
    routings = recorder.runner.routings
    searches = [str(source) for source, searches in routings.items() if source and searches]
    if routings:
        lines = searches or [str(source) for source in routings if source]
        way = f" (--size-hint {searches[-1]}=N for another size)" if searches else ""
        at = f" at {', '.join(lines)}" if lines else ""
        taken = name_routing(recorder.runner.hints.routing)
        yield f"The routing of tokens decides{at}: taken as {taken}{way}."


def _note_draws(recorder: Recorder) -> Iterator[str]:
    for source in recorder.runner.draws:
        at = f" at {source}" if source else ""
        yield f"A random draw decides{at}: taken as 0.5."


def _explain_randomness(recorder: Recorder) -> str:
    if recorder.runner.draws:
        return "a random draw decides which way it goes"
    for source in recorder.seeding:
        return f"it sets the state of the random numbers{f' at {source}' if source else ''}"
    return ""


def lay_out(step: Step, recorder: Recorder) -> Step:
    """Lays a step's model out on the mesh of processes, if there is one."""
    if step.parallelize is None:
        return step
    model = step.parallelize(step.model)
    recorder.ledger.forget_freed()
    return replace(step, model=model)
