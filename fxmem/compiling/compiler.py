"""Dynamo and inductor while a recording runs: PyTorch decides what a compiled step holds.

Dynamo takes the code apart on the recording's fake tensors, AOTAutograd and the partitioner choose
what is saved, and inductor plans the memory for the target, up to the kernels, which are not
compiled (:mod:`fxmem.compiling.lowering`). Compiled code then runs like any other code: its
allocations are operators of the recording (:mod:`fxmem.compiling.wrapper`), and so is what runs
eagerly between two graphs.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fxmem.compiling.devices import show_gpu_to_dynamo
from fxmem.compiling.lowering import lower_graph
from fxmem.compiling.padding import answer_benchmarks
from fxmem.compiling.places import Direction, PlaceLog
from fxmem.compiling.wrapper import make_program
from fxmem.errors import FxmemError, TraceError, UsageError, summarize_error
from fxmem.kernels.functions import Lowering
from fxmem.kernels.registry import Backend
from fxmem.patching import hold_process, is_own_mode, leave_recording, patch, resume_recording
from fxmem.recording.recorder import Recorder
from fxmem.recording.saves import take_hooks_off
from fxmem.source import is_user_file
from fxmem.tracing.compiled import COMPILED, NOT_COMPILED, patch_when_imported
from fxmem.versions.release import is_release

_BUDGET = "activation_memory_budget"
_OWN_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep
_OWN_PACKAGE = __name__.partition(".")[0] + "."
_BACKENDS = ("inductor", "aot_eager", "eager")
_CONVERT = "torch._dynamo.convert_frame"
_CHECKS = "torch._C._dynamo.guards"
_EVALUATE = "torch._dynamo.eval_frame"
_NOT_COUNTED = {
    "triton.cudagraphs": "pools of CUDA graphs (mode='reduce-overhead')",
    "max_autotune": "kernels that are chosen by their speed (max_autotune)",
    "max_autotune_gemm": "kernels that are chosen by their speed (max_autotune)",
}
"""Settings of inductor's that are left out, with what they would take."""

_NO_MODES = dict.fromkeys(
    ("is_in_torch_dispatch_mode", "should_skip_due_to_torch_dispatch_mode"),
    lambda **_options: False,
)
"""Functions that tell Dynamo up to 2.10 that a mode sees operators, also when it has been left."""
_ENGINE = "Compiled autograd was left out: backward runs as autograd's own engine runs it."


@dataclass(frozen=True, slots=True)
class Compilation:
    """The way that a step is compiled.

    Attributes:
        model: Arguments of ``torch.compile`` for the model; None to compile what the code compiles.
        activation_memory_budget: Takes the place of that in ``torch._functorch.config``; None to
            leave the code's.
    """

    model: Mapping[str, Any] | None = None
    activation_memory_budget: float | None = None


@contextlib.contextmanager
def _leave_recording() -> Iterator[None]:
    """Leaves the recording with its hooks: transforms that Dynamo traces refuse any."""
    with hold_process(), leave_recording(), take_hooks_off():
        yield


@contextlib.contextmanager
def run_compiler(recorder: Recorder, target: Backend, compilation: Compilation) -> Iterator[None]:
    """Lets ``torch.compile`` compile within, for the device that the recording runs on.

    So do functions that were compiled before: on fake tensors they are compiled anew.
    """
    compiler = _Compiler(recorder, target, compilation.activation_memory_budget)
    with (
        compiler.tell_failure(),
        patch({torch: {"compile": compiler.compile}}),
        patch_when_imported("torch._dynamo", lambda _module: compiler.watch_dynamo()),
        patch_when_imported("torch._dynamo.compiled_autograd", compiler.leave_out_engine),
    ):
        yield


class _Compiler:
    """Stands for ``torch.compile``, and sees what Dynamo and AOTAutograd make of the code."""

    def __init__(self, recorder: Recorder, target: Backend, budget: float | None) -> None:
        self._recorder = recorder
        self._target = target
        self._budget = budget
        self._compile = torch.compile
        self._summary = ""
        if budget is not None:  # until there is a graph
            self._summary = f"{_BUDGET} {budget:g} changes nothing: no code is compiled."
            recorder.notes[self._summary] = None
        self._graphs = self._recompilations = 0
        self._breaks: dict[str, None] = {}
        self._codes: list[Any] = []
        self._failures: dict[Any, str] = {}

    def compile(self, model: Any = None, **options: Any) -> Any:
        """Takes the arguments of ``torch.compile``."""
        if model is None:
            return lambda function: self.compile(function, **options)
        backend = options.get("backend", "inductor")
        if getattr(backend, "__name__", backend) not in _BACKENDS and not options.get("disable"):
            raise UsageError(
                f"torch.compile(backend={backend!r}) is not analysed",
                hint="inductor, aot_eager or eager; or eager figures: --eager, compile=False",
            )
        with hold_process(), leave_recording(), _import_quietly():
            return self._compile(model, **options)

    @contextlib.contextmanager
    def watch_dynamo(self) -> Iterator[None]:
        """Has frames converted outside of the recording, whose modes and patches they must not see.

        Guards are made within: they hold where the code runs.
        """
        convert: Any = importlib.import_module(_CONVERT)
        rules: Any = importlib.import_module("torch._dynamo.trace_rules")
        guards: Any = importlib.import_module("torch._dynamo.guards").CheckFunctionManager
        graphs: Any = importlib.import_module("torch._dynamo.output_graph").OutputGraph
        utils: Any = importlib.import_module("torch._dynamo.utils")
        list_inputs, run_node = graphs.example_inputs, utils.run_node
        convert_frame, make_guards = convert.CatchErrorsWrapper.__call__, guards.__init__

        def convert_outside(wrapper: Any, frame: Any, entry: Any, *state: Any) -> Any:
            if str(frame.f_globals.get("__name__")).startswith(_OWN_PACKAGE):
                return _skip_frame(is_all=frame.f_code.co_name == "__torch_dispatch__")
            has_gradients = torch.is_grad_enabled()
            with (
                _leave_recording(),
                torch.set_grad_enabled(has_gradients),
                self._replace_inductor(),
                show_gpu_to_dynamo(self._target.device),
                patch(own),
            ):
                self._codes.append(frame.f_code)
                self._recompilations += entry is not None
                self._recorder.compiling = _name_code(frame.f_code)
                try:
                    return convert_frame(wrapper, frame, entry, *state)
                except FxmemError:
                    raise
                except Exception as error:
                    self._note_failure(frame.f_code, error)
                    return _skip_frame()
                finally:
                    self._recorder.compiling = ""

        def run_on_target(*call: Any) -> Any:
            with Lowering(self._target):  # the host's attention refuses what a GPU's takes
                return run_node(*call)

        def list_own_inputs(graph: Any) -> list[Any]:
            return [_make_own(each, graph.tracing_context) for each in list_inputs(graph)]

        def make_guards_inside(manager: Any, *parts: Any, **more: Any) -> None:
            graph = parts[1 if is_release(since=(2, 7)) else 0]  # after the code
            with resume_recording():
                functions: Any = torch.overrides
                graph.torch_function_mode_stack = functions._get_current_function_mode_stack()
                make_guards(manager, *parts, **more)

        own: dict[Any, dict[str, Any]] = {
            guards: {"__init__": make_guards_inside},
            graphs: {"example_inputs": list_own_inputs},
            convert: _NO_MODES,
            utils: {"run_node": run_on_target},
        }
        rules.SKIP_DIRS.append(_OWN_FOLDER)  # hooks of the recording are no part of the code
        rules._recompile_re()
        try:
            with (
                self._excuse_failures(),
                _keep_own_modes(),
                patch({convert.CatchErrorsWrapper: {"__call__": convert_outside}}),
            ):
                yield
        finally:
            rules.SKIP_DIRS.remove(_OWN_FOLDER)
            rules._recompile_re()
            # Code that is compiled for the recording goes with it.
            reset_code: Any = importlib.import_module(_EVALUATE).reset_code
            for code in self._codes:
                reset_code(code)

    def leave_out_engine(self, module: Any) -> contextlib.AbstractContextManager[None]:
        """Leaves out compiled autograd, which compiles backward as a whole, and says so."""

        def enable(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
            self._recorder.notes[_ENGINE] = None
            return contextlib.nullcontext()

        return patch({module: {"_enable": enable}})

    @contextlib.contextmanager
    def tell_failure(self) -> Iterator[None]:
        """Tells what could not be compiled where it does not run eagerly: flexible attention."""
        try:
            yield
        except NotImplementedError as error:
            codes = [step.f_code for step, _ in traceback.walk_tb(error.__traceback__)]
            failures = [self._failures[code] for code in codes if code in self._failures]
            if not failures or "no rule registered" not in str(error):
                raise
            raise TraceError(failures[-1], hint="it does not run eagerly: leave it out") from error

    def _excuse_failures(self) -> contextlib.AbstractContextManager[None]:
        """Has a function with ``fullgraph=True`` run eagerly that cannot be compiled here.

        From 2.12 on, Dynamo counts the frames that are compiled, and complains of none.
        """
        name, owner = "set_fullgraph_compiled_frame_count", importlib.import_module(_EVALUATE)
        set_count = getattr(owner, name, None)
        if set_count is None:
            return contextlib.nullcontext()

        def set_and_excuse(count: int) -> int:
            before: int = set_count(count)
            return before or int(count == -1 and NOT_COMPILED in self._recorder.notes)

        return patch({owner: {name: set_and_excuse}})

    def _replace_inductor(self) -> contextlib.AbstractContextManager[None]:
        """Has inductor lower what it would compile, within."""
        with _import_quietly():
            inductor: Any = importlib.import_module("torch._inductor.compile_fx")
            if is_release(before=(2, 11)):  # whose patterns are made once, where there is a GPU
                importlib.import_module("torch._inductor.fx_passes.joint_graph").lazy_init()
        compile_fx = inductor.compile_fx

        def lower(graph: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
            if rest or "inner_compile" in options:  # it calls itself
                return compile_fx(graph, inputs, *rest, **options)
            return self._lower(compile_fx, graph, inputs, **options)

        return patch({inductor: {"compile_fx": lower}})

    def _lower(
        self,
        compile_fx: Callable[..., Any],
        graph: Any,
        inputs: Any,
        *,
        config_patches: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Compiles a graph of Dynamo's, with the arguments of ``compile_fx``."""
        config: Any = importlib.import_module("torch._functorch.config")
        log = PlaceLog(self._recorder)

        def lower(module: Any, inputs: Any, **choices: Any) -> Callable[[list[Any]], Any]:
            source, places = lower_graph(module, inputs, self._target, choices)
            way: Direction = "inference" if choices.get("is_inference") else "forward"
            way = "backward" if choices.get("is_backward") else way
            return make_program(source, self._target.device, places, log, way)

        changes: dict[str, Any] = {} if self._budget is None else {_BUDGET: self._budget}
        settings = self._leave_out(config_patches or {})
        with (
            _lower_backward_at_once(),
            config.patch(changes),
            Lowering(self._target),
            answer_benchmarks(self._target),
            warnings.catch_warnings(),  # such as how the GPU may be faster; an error in many tests
        ):
            warnings.simplefilter("ignore")
            reason = getattr(graph, "compile_subgraph_reason", None)
            self._note_graph(reason, config.activation_memory_budget)
            return compile_fx(
                graph, inputs, inner_compile=lower, config_patches=settings, **options
            )

    def _leave_out(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Leaves out what is chosen on the device, and notes that."""
        config: Any = importlib.import_module("torch._inductor.config")
        chosen = config.get_config_copy() | settings
        left_out = [name for name in _NOT_COUNTED if chosen.get(name)]
        for cause in map(_NOT_COUNTED.__getitem__, left_out):
            note = f"torch.compile is analysed in its default mode: {cause} are not counted."
            self._recorder.notes[note] = None
        settings |= dict.fromkeys(left_out, False)
        return settings | {"force_disable_caches": True, "compile_threads": 1}  # no processes

    def _note_graph(self, reason: Any, budget: float) -> None:
        """Counts a graph, and notes where the code broke it off."""
        self._graphs += 1
        self._recorder.has_cycles = True
        stack: list[traceback.FrameSummary] = getattr(reason, "user_stack", None) or []
        lines = [each for each in stack if is_user_file(each.filename)]
        if lines and reason.graph_break:
            self._breaks[f"{os.path.basename(lines[-1].filename)}:{lines[-1].lineno}"] = None
        notes = self._recorder.notes
        notes.pop(self._summary, None)
        counts = [(self._graphs, "graph"), (self._recompilations, "recompilation")]
        parts = [f"{count} {name}{'s'[: count != 1]}" for count, name in counts if count]
        if self._breaks:
            parts.insert(1, f"broken off at {', '.join(self._breaks)}")
        if budget != 1:
            parts.append(f"{_BUDGET} {budget:g}")
        self._summary = f"{COMPILED}{', '.join(parts)}."
        notes[self._summary] = None

    def _note_failure(self, code: Any, error: Exception) -> None:
        """Notes that a function could not be compiled here, and runs eagerly."""
        failure = f"{_name_code(code)} could not be compiled here: {summarize_error(error)}"
        self._failures[code] = failure
        if NOT_COMPILED not in self._recorder.notes:
            self._recorder.notes |= {NOT_COMPILED: None, failure: None}


def _skip_frame(*, is_all: bool = False) -> Any:
    """Leaves a frame alone, and what it calls if nothing of that is the code's own."""
    if not is_release(since=(2, 7)):
        return None
    types: Any = importlib.import_module("torch._dynamo.types")
    skips, goes_on = types.FrameAction.SKIP, types.FrameAction.DEFAULT
    strategy = types.FrameExecStrategy(skips, skips if is_all else goes_on)
    return types.ConvertFrameReturn(strategy)


def _keep_own_modes() -> contextlib.AbstractContextManager[None]:
    """Has compiled code enter modes on top of the recording's, and guard the others alone."""
    utils: Any = importlib.import_module("torch._dynamo.utils")
    set_modes = utils.set_torch_function_mode_stack

    def set_modes_above(modes: list[Any]) -> None:
        every = utils.get_torch_function_mode_stack()
        set_modes([*filter(is_own_mode, every), *modes])

    return patch(
        {
            utils: {"set_torch_function_mode_stack": set_modes_above},
            importlib.import_module(_CHECKS).RootGuardManager: {
                "add_torch_function_mode_stack_guard": _guard_code_s_modes
            },
        }
    )


def _guard_code_s_modes(root: Any, modes: list[Any], *names: Any) -> None:
    """Guards function modes that the code has entered: backward has left the recording's."""

    def list_types(modes: list[Any]) -> list[type]:
        return [type(mode) for mode in modes if not is_own_mode(mode)]

    functions: Any = torch.overrides
    types = list_types(modes)
    root.add_lambda_guard(
        lambda _: list_types(functions._get_current_function_mode_stack()) == types, *names
    )


def _name_code(code: Any) -> str:
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


@contextlib.contextmanager
def _import_quietly() -> Iterator[None]:
    """Imports modules of torch without warnings about their own code, or processes of theirs."""
    config: Any = importlib.import_module("torch._inductor.config")
    with warnings.catch_warnings(), config.patch(compile_threads=1):
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _make_own(value: Any, context: Any) -> Any:
    """Makes of the recording's fake tensor one of Dynamo's, with the sizes that it takes as fixed.

    AOTAutograd does so from 2.11 on, and refuses to before.
    """
    if not isinstance(value, FakeTensor) or value.fake_mode is context.fake_mode:
        return value
    sizes = context.tensor_to_context.get(value)
    source = sizes and sizes.tensor_source
    return context.fake_mode.from_tensor(value, symbolic_context=sizes, source=source)


@contextlib.contextmanager
def _lower_backward_at_once() -> Iterator[None]:
    """Has a backward lowered with its forward: when it first runs, it would be recorded.

    Source: ``torch/_functorch/config.py``, which has a setting from 2.10 on. Before, it is lowered
    where AOTAutograd would keep it for later (``AOTDispatchAutograd``).
    """
    config: Any = importlib.import_module("torch._functorch.config")
    uncached = {"enable_autograd_cache": False}
    if is_release(since=(2, 10)):
        with config.patch(uncached | {"force_non_lazy_backward_lowering": True}):
            yield
        return
    wrappers: Any = importlib.import_module("torch._functorch._aot_autograd.runtime_wrappers")
    owner = wrappers.AOTDispatchAutograd
    finish = owner.post_compile

    def finish_both(forward: Any, backward: Any, *rest: Any, **more: Any) -> Any:
        *_, later, options = rest
        if backward is None:
            with torch._C._DisableAutocast():
                backward = options.bw_compiler(later.bw_module, later.placeholder_list)
        return finish(forward, backward, *rest, **more)

    with config.patch(uncached), patch({owner: {"post_compile": staticmethod(finish_both)}}):
        yield
