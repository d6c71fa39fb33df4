"""A training script, run unchanged on fake tensors until some steps are recorded."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _device
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fxmem.analysis import Analysis, Setup
from fxmem.analyzing import find_settings
from fxmem.errors import FxmemError, TraceError, UsageError
from fxmem.gpus import CONTEXT_BYTES
from fxmem.graph import EMPTY_CACHE, Category, Phase
from fxmem.kernels.cuda.gpu import use_gpu
from fxmem.kernels.cuda.present_gpu import show_gpu
from fxmem.kernels.functions import lower_functions
from fxmem.loading.building import silence_fake_kernels
from fxmem.memory.allocator import AllocatorMeter, DeviceMemory
from fxmem.parallelism.process_group import offer_group, run_outside_modes
from fxmem.recording.assemble import assemble_graph
from fxmem.recording.failures import explain_failure
from fxmem.recording.isolation import replace_inference_mode, stop_garbage_collection
from fxmem.recording.options import Options, resolve_options
from fxmem.recording.size_hints import SizeHint
from fxmem.recording.step import note_assumptions
from fxmem.scripts.launchers import Launcher
from fxmem.scripts.script_recorder import ScriptRecorder
from fxmem.scripts.script_run import Progress, ScriptRun
from fxmem.scripts.script_tracer import ScriptTracer
from fxmem.scripts.stand_ins import watch_comparisons
from fxmem.scripts.threads import follow_threads
from fxmem.tracing.compiled import NOT_COMPILED, leave_out_compiler
from fxmem.tracing.conditions import leave_autocast
from fxmem.tracing.fakes import holds_fakes, make_fake_mode
from fxmem.tracing.reach import list_slots
from fxmem.tracing.source import find_source
from fxmem.tracing.values import answer_fake_checks
from fxmem.versions.release import check_release

_MOST_STEPS = 100
"""Steps of one optimizer after which those that have not stepped are not waited for.

A critic takes up to 100 steps to one of its generator; layers that are trained one after the other
have an optimizer each.
"""


LONG_STEP = 100_000
"""Operators of a step, as of a GPT of 20 layers that accumulates 32 gradients (nanochat)."""


class _EnoughSteps(BaseException):
    """Ends the script: all steps asked for are recorded, and another begins."""


def run_script(
    path: str,
    arguments: Sequence[str] = (),
    *,
    is_module: bool = False,
    steps: int | None = None,
    device: str = "cuda",
    gpu: str | None = None,
    attention: str | None = None,
    alloc_conf: str | None = None,
    size_hint: SizeHint = None,
    world_size: int | None = None,
    rank: int = 0,
    progress: Progress | None = None,
) -> ScriptRun:
    """Runs a script as ``python`` does and records its steps: :func:`fxmem.run`.

    With ``progress``, which says meanwhile how far it is, Ctrl-C ends the script like its last step
    once there is one.
    """
    check_release()
    if steps is not None and steps < 1:
        raise UsageError(f"--steps must be 1 or more, got {steps}")
    launcher = Launcher(rank, world_size)
    options = resolve_options(device=device, gpu=gpu, attention=attention, size_hint=size_hint)
    settings = find_settings(options.target.name, alloc_conf)
    session = _Session(options, steps, launcher, settings)
    if progress is not None:
        progress.describe = session.describe_progress
    with session.watch():
        try:
            launcher.launch([*(("python", "-m") if is_module else ()), path, *arguments])
        except _EnoughSteps:
            pass
        except KeyboardInterrupt:
            if progress is None or not session.windows:
                raise
            return session.describe(partial=True)
        except SystemExit as error:
            if error.code not in (None, 0) and not session.windows:
                raise TraceError(
                    f"{launcher.script} ended with exit code {error.code!r} before a step",
                    hint="give its arguments after its name",
                ) from error
        except Exception as error:
            if not session.is_done:
                if isinstance(error, FxmemError):
                    raise
                raise _explain(error, launcher.script, size_hint is not None) from error
        session.end_script()
    launcher.check_place()
    return session.describe()


def _explain(error: Exception, script: str, has_size_hint: bool) -> FxmemError:
    explained = explain_failure(error, None, has_size_hint)
    if isinstance(explained, TraceError) and explained.cause.startswith("the step failed"):
        cause = re.sub(r"\x1b\[[0-9;]*m", "", explained.cause.removeprefix("the step failed"))
        return TraceError(f"{script} failed{cause}", explained.hint)
    return explained


class _Session:
    """One run of a script: its modes, its optimizers and its windows of recording."""

    def __init__(
        self, options: Options, steps: int | None, launcher: Launcher, settings: Any
    ) -> None:
        self.windows: list[Analysis] = []
        self._options = options
        self._steps = steps
        self._launcher = launcher
        self._settings = settings
        self._recorder = ScriptRecorder(options.target, options.hints)
        self._tracer = ScriptTracer(self._recorder, options.target.device, self._begin)
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._stepped: Counter[int] = Counter()
        self._idle: set[int] = set()
        self._phases = [Phase.FORWARD]
        self._notes: dict[str, None] = {}

    # -- the run -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Records what runs within."""
        target, recorder = self._options.target, self._recorder
        fake_mode = make_fake_mode()
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            enter(stop_garbage_collection())
            enter(leave_autocast())
            enter(silence_fake_kernels())
            enter(use_gpu(self._options.architecture))
            if target.name == "cuda":
                architecture, count = self._options.architecture, self._launcher.count_gpus
                enter(show_gpu(architecture, self._offer_counters(), count=count))
            enter(recorder.casts.watch_exits())
            enter(recorder.watch_resizing())
            enter(offer_group())
            enter(answer_fake_checks())
            enter(replace_inference_mode())
            enter(leave_out_compiler(self._notes))
            enter(self._watch_torch())
            enter(fake_mode)
            enter(recorder)
            recorder.begin_step()
            watch_comparisons(recorder.reads.see_comparison)
            stack.callback(watch_comparisons, None)
            enter(recorder.watch_saved())
            noted = enter(lower_functions(target))
            enter(self._tracer.trace())
            if target.name == "cuda":  # on the CPU, what prefetchers make stays real
                enter(follow_threads(recorder.watch_saved))
            try:
                yield
            finally:
                recorder.end_step()
                self._notes.update(dict.fromkeys((*note_assumptions(recorder), *noted)))

    @contextlib.contextmanager
    def _watch_torch(self) -> Iterator[None]:
        """Sees optimizers and the engine of autograd, and replaces what needs real tensors."""
        device, dtype = _device.CURRENT_DEVICE, torch.get_default_dtype()
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        handles = (
            register_optimizer_step_pre_hook(self._begin_optimizer),
            register_optimizer_step_post_hook(self._end_optimizer),
        )
        replacements: list[tuple[Any, str, Any]] = [
            (torch.autograd, "_engine_run_backward", self._watch_engine),
            (torch, "save", self._save),
            (torch, "load", self._load),
            (Optimizer, "__init__", self._see_optimizer),
            (nn.Module, "_apply", self._move_module),
            (torch.utils, "swap_tensors", lambda swap: _swap_tensors),
            (
                FakeTensor,
                "tolist",
                lambda _: lambda tensor: self._recorder.reads.list_values(tensor),
            ),
            (DataLoader, "__init__", self._see_loader),
        ]
        if self._recorder.makes_fakes:  # but no loader does, with its samplers
            replacements += [
                (DataLoader, "__iter__", _run_real),
                (_BaseDataLoaderIter, "__next__", self._load_batch),
                (nn.Parameter, "__new__", self._make_parameter),
            ]
        with contextlib.ExitStack() as stack:
            for owner, name, make in replacements:
                stack.enter_context(mock.patch.object(owner, name, make(getattr(owner, name))))
            torch.__future__.set_swap_module_params_on_conversion(True)
            try:
                yield
            finally:
                torch.__future__.set_swap_module_params_on_conversion(swaps)
                torch.set_default_dtype(dtype)
                if _device.CURRENT_DEVICE is not device:
                    torch.set_default_device(device)
                for handle in handles:
                    handle.remove()

    def _offer_counters(self) -> dict[str, Callable[..., Any]]:
        """Makes the functions that read and reset the counters of the GPU's allocator."""
        ledger, gpu = self._recorder.ledger, self._options.gpu
        memory = None if gpu is None else DeviceMemory(gpu.capacity_bytes, CONTEXT_BYTES[1])
        meter = AllocatorMeter(self._settings, memory)

        def after(do: Callable[[], Any]) -> Callable[..., Any]:
            def feed_and_do(*_args: Any, **_kwargs: Any) -> Any:
                meter.feed(ledger.history, ledger.streams)
                return do()

            return feed_and_do

        return {
            "memory_stats_as_nested_dict": after(meter.read),
            "reset_peak_memory_stats": after(meter.reset_peaks),
            "reset_accumulated_memory_stats": after(meter.reset_sums),
            "empty_cache": after(self._recorder.empty_cache),
        }

    # -- steps ---------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """Whether all steps asked for are recorded; where none were, three, or two long ones."""
        is_long = any(len(step.graph.operations) > LONG_STEP for step in self.windows)
        return len(self.windows) >= (self._steps or (2 if is_long else 3))

    def end_script(self) -> None:
        """Keeps what ran after the last step, or all of a script without one."""
        ran = any(operation.name != EMPTY_CACHE for operation in self._recorder.operations[1:])
        if ran and not self.is_done:
            self._end_window()

    def describe_progress(self) -> str:
        """Describes how far the script is."""
        operators = sum(len(step.graph.operations) for step in self.windows)
        operators += len(self._recorder.operations)
        return f", step {len(self.windows) + 1}, {operators:,} operators"

    def describe(self, *, partial: bool = False) -> ScriptRun:
        """Describes the steps.

        Raises:
            TraceError: Nothing was recorded.
        """
        if all(len(step.graph.operations) == 1 for step in self.windows):
            device = self._options.target.name
            raise TraceError(
                f"{self._launcher.script} ended without an operation on {device}",
                hint="does it move its model there? --device cpu records a script for the CPU",
            )
        operators = (each.name for step in self.windows for each in step.graph.operations)
        notes = (*self._notes, *self._options.list_notes(operators))
        return ScriptRun(
            tuple(self.windows), tuple(self._recorder.reads.reads.values()), notes, partial
        )

    def _end_window(self) -> None:
        with self._recorder.ledger.lock:
            self._describe_window()

    def _describe_window(self) -> None:
        recorder, tracer = self._recorder, self._tracer
        recorder.end_step()
        self._label_state()
        graph = assemble_graph(recorder, tracer.list_nodes())
        optimizers = dict.fromkeys(type(o).__name__ for o in self._list_optimizers())
        number = len(self.windows) + 1
        done = not self.windows or not self._optimizers or bool(self._stepped)
        setup = Setup(
            model=self._launcher.script,
            inputs=(f"step {number}" if done else f"after step {number - 1}",),
            mode="script",
            device=self._options.target.name,
            optimizer=", ".join(optimizers) or None,
            loss=None,
            frontend="record",
            gpu=self._options.gpu.name if self._options.gpu else None,
            attention=self._options.architecture.attention,
            compiled=NOT_COMPILED in self._notes,
        )
        self.windows.append(Analysis(setup, graph, self._settings, self._options.gpu))
        gc.collect(0)
        self._stepped.clear()
        tracer.begin_window()
        recorder.begin_step()

    def _label_state(self) -> None:
        names = self._tracer.label_modules()
        for optimizer in self._list_optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = names.get(id(parameter), "")
                    self._recorder.label(parameter, Category.PARAMETER, name)
                    self._recorder.label(parameter.grad, Category.GRADIENT, name and f"{name}.grad")
            for owner, state in optimizer.state.items():
                for key, value in state.items() if isinstance(state, dict) else ():
                    name = f"{names.get(id(owner), '')}.{key}".strip(".")
                    self._recorder.label(value, Category.OPTIMIZER_STATE, name)

    def _list_optimizers(self) -> list[Optimizer]:
        return [o for o in (ref() for ref in self._optimizers) if o is not None]

    # -- what torch runs -----------------------------------------------------------------------

    @contextlib.contextmanager
    def _be_in(self, phase: Phase, depth: int) -> Iterator[None]:
        self._phases.append(phase)
        self._recorder.set_phase(phase)
        try:
            with self._tracer.be_silent(depth):
                yield
        finally:
            self._phases.pop()
            self._recorder.set_phase(self._phases[-1])

    def _watch_engine(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            if self._phases[-1] is Phase.BACKWARD:  # within another, as a reentrant checkpoint's
                return run(*args, **kwargs)
            self._begin()
            self._recorder.makes_graph = args[3]
            with self._be_in(Phase.BACKWARD, 1):
                for loss in tree_leaves(args[0]):
                    self._recorder.label(loss, Category.OUTPUT, "loss")
                self._tracer.micro_batches.begin_backward(tree_leaves(args[0]))
                result = run(*args, **kwargs)
            self._tracer.micro_batches.end_backward()
            self._tracer.label_modules()
            if not self._optimizers and kwargs.get("accumulate_grad"):
                self._end_window()  # the script updates its parameters by hand
            return result

        return _engine_run_backward

    def _begin_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._begin()
        self._phases.append(Phase.OPTIMIZER)
        self._recorder.set_phase(Phase.OPTIMIZER)
        self._tracer._opaque_depth += 1
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return None

        def run_closure() -> Any:  # the step's forward and backward, as Lightning runs them
            with self._be_in(Phase.FORWARD, 0):
                return closure()

        if len(args) > 1:
            return (args[0], run_closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": run_closure}

    def _end_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._phases.pop()
        self._recorder.set_phase(self._phases[-1])
        self._tracer._opaque_depth -= 1
        self._stepped[id(optimizer)] += 1
        self._idle.discard(id(optimizer))
        others = {id(other) for other in self._list_optimizers()} - self._stepped.keys()
        if self._stepped[id(optimizer)] >= _MOST_STEPS and not others <= self._idle:
            self._idle |= others
            self._notes[
                f"{len(others)} of the script's optimizers did not step while another did"
                f" {_MOST_STEPS} times: a step does not wait for them."
            ] = None
        if others <= self._idle:
            self._end_window()

    def _begin(self) -> None:
        """Sees a model, backward or an optimizer begin, and ends the script after its steps.

        What comes before one, such as a line that prints the peak, is the last step's.
        """
        if self.is_done:
            raise _EnoughSteps

    def _see_optimizer(self, init: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(init)
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            self._optimizers.append(weakref.ref(optimizer))

        return __init__

    def _move_module(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        def _apply(module: Any, *args: Any, **kwargs: Any) -> Any:
            with self._tracer.be_silent():
                result = apply(module, *args, **kwargs)
            parameter = next(module.parameters(recurse=False), None)
            for kind, move in self._options.target.movers.items():
                if isinstance(module, kind) and isinstance(parameter, FakeTensor):
                    move(module)
            return result

        return _apply

    def _make_parameter(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def __new__(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
            return make(cls, self._recorder.adopt(data), requires_grad)

        return __new__

    def _see_loader(self, init: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(init)  # Lightning reads the names of the arguments to make it again
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:
            init(loader, *args, **kwargs)
            loader.pin_memory = False  # which makes a copy faster that is not made

        return __init__

    def _load_batch(self, load: Callable[..., Any]) -> Callable[..., Any]:
        run = _run_real(load)
        return lambda iterator: self._recorder.hold(run(iterator))

    def _save(self, save: Callable[..., Any]) -> Callable[..., Any]:
        def save_real(saved: Any, *args: Any, **kwargs: Any) -> None:
            if holds_fakes(saved):
                at = find_source()
                self._notes[f"torch.save at {at} wrote nothing: its tensors have no values."] = None
                return
            save(saved, *args, **kwargs)

        return save_real

    def _load(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def load_to_gpu(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            device = str(map_location) if isinstance(map_location, str | torch.device) else ""
            with run_outside_modes():
                loaded = load(file, "cpu", *args, **kwargs)
            if not device.startswith("cuda"):
                return self._recorder.hold(loaded, is_loaded=not kwargs.get("mmap"))
            return tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), loaded)

        return load_to_gpu


def _run_real(run: Callable[..., Any]) -> Callable[..., Any]:
    def run_real(*args: Any, **kwargs: Any) -> Any:
        with run_outside_modes():
            return run(*args, **kwargs)

    return run_real


def _swap_tensors(one: Any, other: Any) -> None:
    """Swaps what two tensor objects are; ``torch.utils.swap_tensors`` without its checks.

    It refuses tensors with weak references, and the mode of the fakes has some to each.
    """
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    kind: Any = type(one)
    for name in list_slots(kind):  # a DTensor's local tensor and placements
        mine, its = getattr(one, name), getattr(other, name)
        setattr(one, name, its)
        setattr(other, name, mine)
    torch._C._swap_tensor_impl(one, other)
