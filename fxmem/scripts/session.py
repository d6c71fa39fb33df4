"""Session in which code runs on fake tensors and is recorded, a window for each step."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

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

from fxmem.analysis import Analysis
from fxmem.errors import TraceError
from fxmem.fakes.devices import translate_devices
from fxmem.fakes.fake_mode import make_fake_mode
from fxmem.gpus import CONTEXT_BYTES
from fxmem.graph import EMPTY_CACHE, Category, Phase
from fxmem.memory.allocator.heap import DeviceMemory
from fxmem.memory.allocator.meter import AllocatorMeter
from fxmem.parallelism.process_group import run_outside_modes
from fxmem.patching import count_left, hold_process, patch
from fxmem.recording.assemble import assemble_graph
from fxmem.recording.autograd import watch_engine
from fxmem.recording.saves import hook_saves, watch_saved
from fxmem.scripts.apart import Apart, list_waiting, trains
from fxmem.scripts.batches import FullestBatches
from fxmem.scripts.data import RealData
from fxmem.scripts.launchers import Launcher
from fxmem.scripts.moves import Moves
from fxmem.scripts.script_recorder import LOAD, ScriptRecorder
from fxmem.scripts.script_run import Read, ScriptRun
from fxmem.scripts.script_tracer import ScriptTracer
from fxmem.scripts.threads import follow_threads
from fxmem.scripts.windows import EnoughSteps, Windows
from fxmem.setup import Setup
from fxmem.tracing.compiled import force_eager, read_compile
from fxmem.training.isolation import imitate_target, offer_machine
from fxmem.training.options import Options
from fxmem.training.step import note_assumptions
from fxmem.versions.release import check_release

_MOST_STEPS = 100
"""Steps of one optimizer after which optimizers that have not stepped are not waited for.

A critic takes up to 100 steps to one of its generator; layers that are trained one after the other
have an optimizer each.
"""


class Session:
    """One recording of steps: its modes, its optimizers and its windows.

    Args:
        options: The target device and what is assumed of it.
        windows: Keeps what is recorded, and says when that is enough.
        takes_fullest: Whether the steps get the largest batches of their loader.
        launcher: Names what runs, and counts the GPUs.
        keeps_real: Whether modules that are moved get their real tensors back in the end.

    Attributes:
        windows: As given.
        fake_mode: The mode of the fakes.
    """

    def __init__(
        self,
        options: Options,
        windows: Windows,
        launcher: Launcher,
        *,
        takes_fullest: bool = False,
        keeps_real: bool = False,
    ) -> None:
        check_release()
        self.windows = windows
        self.fake_mode = make_fake_mode()
        self._left = count_left()
        self._options = options
        self._noted: Mapping[str, None] = {}
        self._launcher = launcher
        self._recorder = ScriptRecorder(options.target, options.hints)
        self._tracer = ScriptTracer(
            self._recorder,
            options.target.device,
            lambda model: self._apart.begin_model(model),
            windows,
        )
        self._recorder.add_node = self._tracer.add_compiled
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._kinds: list[str] = []
        self._stepped: Counter[int] = Counter()
        self._idle: set[int] = set()
        self._ever_stepped = set[int]()
        self._phases = [Phase.FORWARD]
        self._apart = Apart(
            windows,
            self._recorder,
            self._describe_window,
            self._begin_window,
            self._list_optimizers,
        )
        found = gc.get_objects() if keeps_real else ()
        self._earlier = [each for each in found if issubclass(type(each), Optimizer)]
        self._kept_states: list[tuple[Optimizer, dict[Any, Any]]] = []
        self._batches = FullestBatches(windows, self._recorder.hold) if takes_fullest else None
        if self._batches is not None:
            self._recorder.see_move = self._batches.see_move
        self._moves = Moves(options.target, self._tracer.run_move, keeps_real=keeps_real)

    # -- the run -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Records what runs within."""
        target, recorder = self._options.target, self._recorder
        with contextlib.ExitStack() as stack:
            enter = self._enter = stack.enter_context
            enter(hold_process())
            stack.callback(self._restore)
            self._freezes = not gc.get_freeze_count()  # nobody else does
            if self._freezes:
                gc.freeze()  # collections need not look at what the process had before
                stack.callback(gc.unfreeze)
            memory = self._offer_counters() if target.name == "cuda" else None
            count = self._launcher.count_gpus
            enter(offer_machine(self._options, count=count, memory=memory))
            enter(self._watch_torch())
            enter(watch_engine(self._begin_backward, self._run_engine))
            enter(self.fake_mode)
            enter(recorder)
            recorder.begin_step()
            enter(watch_saved(recorder))
            if target.name == "cuda":
                enter(translate_devices(target.device))
            self._noted = enter(imitate_target(recorder, target, self._options.compilation))
            enter(self._tracer.trace())
            self._tracer.set_phase(Phase.FORWARD)
            if target.name == "cuda":  # on the CPU, what prefetchers make stays real
                enter(follow_threads(functools.partial(hook_saves, recorder)))
            try:
                yield
            finally:
                recorder.end_step()

    @contextlib.contextmanager
    def _watch_torch(self) -> Iterator[None]:
        """Sees optimizers and the engine of autograd, and replaces what needs real tensors."""
        device, dtype = _device.CURRENT_DEVICE, torch.get_default_dtype()
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        handles = (
            register_optimizer_step_pre_hook(self._begin_optimizer),
            register_optimizer_step_post_hook(self._end_optimizer),
        )
        data = RealData(self._recorder, self.windows, self._batches, self._apart)
        replacements: list[tuple[Any, str, Any]] = [
            (Optimizer, "__init__", self._see_optimizer),
            (
                FakeTensor,
                "tolist",
                lambda _: lambda tensor: self._recorder.reads.list_values(tensor),
            ),
            *data.list_replacements(),
            *((kind, "load_state_dict", self._see_resumption) for kind in (nn.Module, Optimizer)),
            *self._moves.list_replacements(),
        ]
        if self._recorder.makes_fakes:
            replacements.append((nn.Parameter, "__new__", self._make_parameter))
        patches: dict[Any, dict[str, Any]] = {}
        for owner, name, make in replacements:
            patches.setdefault(owner, {})[name] = make(getattr(owner, name))
        with patch(patches), data.watch_writers():
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

    def _restore(self) -> None:
        """Gives modules, and optimizers that were made before, what they had."""
        self._moves.restore()
        for optimizer, kept in self._kept_states:
            optimizer.state.clear()
            optimizer.state.update(kept)
        self._earlier.clear()

    def _offer_counters(self) -> dict[str, Callable[..., Any]]:
        """Makes the functions that read and reset the counters of the GPU's allocator."""
        ledger, gpu = self._recorder.ledger, self._options.gpu
        memory = None if gpu is None else DeviceMemory(gpu.capacity_bytes, CONTEXT_BYTES[1])
        settings = self._options.settings
        assert settings is not None  # on a GPU
        meter = AllocatorMeter(settings, memory)

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

    def read_place(self) -> tuple[int, int]:
        """Reads how many windows have ended, and how many operations this one has."""
        return len(self.windows.ended), len(self._recorder.operations)

    def end(self) -> None:
        """Keeps what ran after the last step, or all of a script without one."""
        if self._optimizers:
            with contextlib.suppress(EnoughSteps):
                self._apart.end_evaluations()
        operations = self._recorder.operations[1:]
        ran = any(operation.name not in (EMPTY_CACHE, LOAD) for operation in operations)
        if self._apart.phase in (Phase.EVALUATION, Phase.GENERATION):
            with contextlib.suppress(EnoughSteps):
                self._apart.end()
        elif ran and not self.windows.is_done:
            self._end_window()

    def describe_progress(self) -> str:
        """Describes how far the script is."""
        operators = sum(len(step.graph.operations) for step in self.windows.steps)
        operators += len(self._recorder.operations)
        compiling = self._recorder.compiling and f", compiling {self._recorder.compiling}"
        return f", {self.windows.describe_running()}, {operators:,} operators{compiling}"

    def describe(self, *, partial: bool = False) -> ScriptRun:
        """Describes the steps.

        Raises:
            TraceError: Nothing was recorded.
        """
        windows = tuple(self.windows.recorded)
        if all(len(window.graph.operations) == 1 for window in windows):
            device = self._options.target.name
            raise TraceError(
                f"{self._launcher.script} ended without an operation on {device}",
                hint="does it move its model there? --device cpu records a script for the CPU",
            )
        fragmentation = self._batches.replay() if self._batches is not None else ()
        operators = (each.name for window in windows for each in window.graph.operations)
        if self._optimizers and not self._ever_stepped:  # LOMO never does; or a branch went wrong
            self._recorder.notes["No optimizer stepped: all that ran is one step."] = None
        for name in self._list_late() if self._ever_stepped else ():
            self._recorder.notes[
                f"{name} did not step in what was recorded: --steps N records N steps."
            ] = None
        noted = (*note_assumptions(self._recorder), *self._noted)
        notes = (*noted, *self._options.list_notes(operators), *self.windows.list_notes())
        return ScriptRun(windows, self.list_reads(), notes, partial, fragmentation)

    def _list_late(self) -> Iterator[str]:
        """Lists the classes of optimizers that never stepped, but for those around another."""
        for optimizer in self._list_optimizers():
            is_around = any(isinstance(each, Optimizer) for each in vars(optimizer).values())
            if id(optimizer) not in self._ever_stepped and not is_around:
                yield type(optimizer).__name__

    def list_reads(self) -> tuple[Read, ...]:
        """Lists the lines that have read values."""
        return tuple(self._recorder.reads.reads.values())

    def _end_window(self) -> None:
        windows, left_out = self.windows, self._tracer.left_out
        with self._recorder.ledger.lock:
            if windows.leaves_out and left_out.is_all:
                windows.pass_over()
                self._recorder.end_step()
                self._begin_window()
                return
            done = not windows.steps or not self._optimizers or bool(self._stepped)
            name = windows.name_step() if done else f"after step {windows.number - 1}"
            windows.keep(self._describe_window(name, None))
            if windows.runs_eagerly:
                self._enter(force_eager(torch._dynamo))
                self._enter(warnings.catch_warnings())
                warnings.simplefilter("ignore")  # such as that the script should compile
            self._begin_window()
        self._apart.phase = None

    def _describe_window(self, window: str, apart: Phase | None) -> Analysis:
        recorder, tracer = self._recorder, self._tracer
        recorder.end_step()
        self._label_state()
        graph = assemble_graph(recorder, tracer.nodes)
        if apart is not None:
            operations = tuple(replace(each, phase=apart) for each in graph.operations)
            graph = replace(graph, operations=operations)
        kinds = [type(optimizer).__name__ for optimizer in self._list_optimizers()]
        self._kinds = [*dict.fromkeys(kinds)] or self._kinds  # of a script that has ended
        setup = Setup(
            model=self._launcher.script,
            inputs=(),
            mode="train" if any(o.phase is Phase.BACKWARD for o in graph.operations) else "infer",
            window=window,
            device=self._options.target.name,
            optimizer=", ".join(self._kinds) or None,
            loss=None,
            frontend="record",
            gpu=self._options.gpu.name if self._options.gpu else None,
            attention=self._options.architecture.attention,
            compile=read_compile(self._recorder.notes),
        )
        return Analysis(setup, graph, self._options.settings, self._options.gpu)

    def _begin_window(self) -> None:
        gc.collect()  # reference cycles, which Python frees sooner or later
        self._apart.begin_window()
        self._stepped.clear()
        self._tracer.begin_window()
        self._recorder.begin_step()

    def _label_state(self) -> None:
        names, optimizers = self._tracer.label_modules(), self._list_optimizers()
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        unnamed = {id(parameter) for group in groups for parameter in group} - names.keys()
        if unnamed:
            names = self._tracer.name_owners(unnamed)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = names.get(id(parameter), "")
                    self._recorder.label(parameter, Category.PARAMETER, name)
                    self._recorder.label(parameter.grad, Category.GRADIENT, name and f"{name}.grad")
            for owner, state in optimizer.state.items():
                for key, value in state.items() if isinstance(state, dict) else ():
                    name = f"{names.get(id(owner), '')}.{key}".strip(".")
                    self._recorder.label(value, Category.OPTIMIZER_STATE, name)
        self._tracer.name_kept()

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

    def _begin_backward(self, _losses: Any) -> None:
        if self._phases[-1] is not Phase.BACKWARD:
            self._apart.begin_step()
            self._recorder.set_phase(Phase.BACKWARD)

    def _run_engine(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Takes the place of autograd's engine."""
        if self._phases[-1] is Phase.BACKWARD:  # within another, as a reentrant checkpoint's
            return run(*args, **kwargs)
        self._apart.begin_step()
        self._recorder.makes_graph = args[3]
        with self._be_in(Phase.BACKWARD, 1):
            for loss in tree_leaves(args[0]):
                self._recorder.label(loss, Category.OUTPUT, "loss")
            self._tracer.micro_batches.begin_backward(tree_leaves(args[0]))
            result = run(*args, **kwargs)
        self._tracer.micro_batches.end_backward()
        trained = self._tracer.label_modules()
        for optimizer in [o for o in self._earlier if trains(o, trained)]:
            self._earlier.remove(optimizer)
            self._optimizers.append(weakref.ref(optimizer))
            with run_outside_modes():
                kept = tree_map_only(torch.Tensor, torch.clone, {**optimizer.state})
            self._kept_states.append((optimizer, kept))
        if not self._optimizers and kwargs.get("accumulate_grad"):
            self._end_window()  # the script updates its parameters by hand
        return result

    def _begin_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if count_left() > self._left:
            return None
        self._apart.begin_step()
        self._tracer.left_out.see_optimizer(optimizer)
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
        if count_left() > self._left:
            return
        self._phases.pop()
        self._recorder.set_phase(self._phases[-1])
        self._tracer._opaque_depth -= 1
        self._stepped[id(optimizer)] += 1
        self._ever_stepped.add(id(optimizer))
        self._idle.discard(id(optimizer))
        others = set(list_waiting(self._list_optimizers(), self._stepped))
        if self._stepped[id(optimizer)] >= _MOST_STEPS and not others <= self._idle:
            self._idle |= others
            self._recorder.notes[
                f"{len(others)} of the script's optimizers did not step while another did"
                f" {_MOST_STEPS} times: a step does not wait for them."
            ] = None
        if others <= self._idle and Phase.OPTIMIZER not in self._phases:  # in another's step
            self._end_window()

    def _see_optimizer(self, init: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(init)
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            self._apart.end_loading()
            if not self._optimizers:  # a backward before the first is no step
                if self._freezes:
                    gc.freeze()  # nor at what was imported and loaded
                self.windows.call_warm_ups()
            self._optimizers.append(weakref.ref(optimizer))

        return __init__

    def _see_resumption(self, load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def load_state_dict(owner: Any, *args: Any, **kwargs: Any) -> Any:
            result = load(owner, *args, **kwargs)
            self._apart.end_resumption()
            return result

        return load_state_dict

    def _make_parameter(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def __new__(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
            return make(cls, self._recorder.adopt(data), requires_grad)

        return __new__
