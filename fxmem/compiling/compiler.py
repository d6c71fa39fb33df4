"""Dynamo and inductor while a recording runs: PyTorch decides what a compiled step holds.

Dynamo takes the code apart on the recording's fake tensors, AOTAutograd and the partitioner choose
what is saved, and inductor plans the memory for the GPU, up to the kernels, which are not compiled
(:mod:`fxmem.compiling.lowering`). Compiled code then runs like any other code: its allocations are
operators of the recording (:mod:`fxmem.compiling.wrapper`), and so is what runs eagerly between two
graphs.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxmem.compiling.lowering import lower_graph
from fxmem.compiling.wrapper import make_program
from fxmem.errors import UsageError
from fxmem.graph import Category
from fxmem.kernels.cuda.gpu import current_gpu
from fxmem.kernels.functions import Lowering
from fxmem.kernels.registry import Backend
from fxmem.patching import hold_process, leave_recording, patch, resume_recording
from fxmem.recording.recorder import Recorder
from fxmem.source import is_user_file

_OWN_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep
_EAGER_BACKENDS = ("eager", "aot_eager")
_CONVERT, _GUARDS = "torch._dynamo.convert_frame", "torch._dynamo.guards"
_MODULES = (_CONVERT, _GUARDS, "torch._dynamo.device_interface", "torch._inductor.compile_fx")


@contextlib.contextmanager
def run_compiler(recorder: Recorder, target: Backend) -> Iterator[None]:
    """Lets ``torch.compile`` compile within, for the GPU that the recording runs on."""
    compiler = _Compiler(recorder, target)
    with compiler.stack, patch({torch: {"compile": compiler.compile}}):
        yield


class _Compiler:
    """Stands for ``torch.compile``, and sees what Dynamo makes of it.

    Attributes:
        stack: Undoes at its end what was done when the first function was compiled.
    """

    def __init__(self, recorder: Recorder, target: Backend) -> None:
        self.stack = contextlib.ExitStack()
        self._recorder = recorder
        self._target = target
        self._compile = torch.compile
        self._graphs = 0
        self._codes: list[Any] = []
        self._is_ready = False

    def compile(self, model: Any = None, **options: Any) -> Any:
        """Takes the arguments of ``torch.compile``."""
        if model is None:
            return lambda function: self.compile(function, **options)
        backend = options.pop("backend", "inductor")
        if backend not in ("inductor", *_EAGER_BACKENDS):
            raise UsageError(
                f"torch.compile(backend={backend!r}) is not analysed",
                hint="inductor, aot_eager or eager; or leave compile out",
            )
        if backend == "inductor" and options.get("mode") not in (None, "default"):
            self._recorder.notes[
                f"torch.compile(mode={options['mode']!r}) is analysed as the default mode: pools of"
                " CUDA graphs, and kernels that are chosen by their speed, are not counted."
            ] = None
        with hold_process(), leave_recording():
            for name in _MODULES:  # as they are where nothing is replaced
                importlib.import_module(name)
            chosen = self._lower if backend == "inductor" else backend
            compiled = self._compile(model, backend=chosen, **options)
        if not self._is_ready:
            self._is_ready = True
            self._watch_dynamo()
        return compiled

    def _watch_dynamo(self) -> None:
        """Has frames converted outside of the recording, whose modes and patches they must not see.

        Guards are made within: they hold where the code runs.
        """
        convert: Any = importlib.import_module(_CONVERT)
        guards: Any = importlib.import_module(_GUARDS)
        convert_frame = convert.CatchErrorsWrapper.__call__
        make_guards = guards.CheckFunctionManager.__init__

        def convert_outside(wrapper: Any, frame: Any, *state: Any) -> Any:
            has_gradients = torch.is_grad_enabled()
            with (
                hold_process(),
                leave_recording(),
                torch.set_grad_enabled(has_gradients),
                patch({guards.CheckFunctionManager: {"__init__": make_guards_inside}}),
            ):
                self._codes.append(frame.f_code)
                return convert_frame(wrapper, frame, *state)

        def make_guards_inside(
            manager: Any, code: Any, graph: Any, *rest: Any, **more: Any
        ) -> None:
            with resume_recording():
                modes: Any = torch.overrides
                graph.torch_function_mode_stack = modes._get_current_function_mode_stack()
                make_guards(manager, code, graph, *rest, **more)

        rules: Any = importlib.import_module("torch._dynamo.trace_rules")
        rules.SKIP_DIRS.append(_OWN_FOLDER)  # hooks of the recording are no part of the code
        rules._recompile_re()
        self.stack.enter_context(patch({convert.CatchErrorsWrapper: {"__call__": convert_outside}}))
        self.stack.callback(self._forget, rules)

    def _forget(self, rules: Any) -> None:
        """Leaves Dynamo as it was, without the code that it has compiled for the recording."""
        rules.SKIP_DIRS.remove(_OWN_FOLDER)
        rules._recompile_re()
        reset_code: Any = importlib.import_module("torch._dynamo.eval_frame").reset_code
        for code in self._codes:
            reset_code(code)

    def _lower(self, graph: Any, inputs: Any, *, mode: Any = None, options: Any = None) -> Any:
        """Compiles a graph of Dynamo's: a backend of ``torch.compile``."""
        compile_fx: Any = importlib.import_module("torch._inductor.compile_fx").compile_fx
        config: Any = importlib.import_module("torch._functorch.config")
        gpu = current_gpu()

        def lower(module: Any, _inputs: Any, **choices: Any) -> Callable[[list[Any]], Any]:
            source = lower_graph(module, gpu, self._target.device, choices)
            return make_program(source, self._target.device, self._name)

        self._note(getattr(graph, "compile_subgraph_reason", None))
        # A backward that is lowered when it first runs would be part of the recording.
        at_once = {"force_non_lazy_backward_lowering": True, "enable_autograd_cache": False}
        with config.patch(at_once), Lowering(self._target):
            return compile_fx(graph, inputs, inner_compile=lower, config_patches=options)

    def _note(self, reason: Any) -> None:
        """Notes that a graph was compiled, and where the code broke it off."""
        notes = self._recorder.notes
        notes.pop(_count_graphs(self._graphs), None)
        self._graphs += 1
        notes[_count_graphs(self._graphs)] = None
        stack: list[traceback.FrameSummary] = getattr(reason, "user_stack", None) or []
        lines = [each for each in stack if is_user_file(each.filename)]
        if lines and reason.graph_break:
            at = f"{os.path.basename(lines[-1].filename)}:{lines[-1].lineno}"
            notes[f"torch.compile breaks the graph at {at}."] = None

    def _name(self, tensor: torch.Tensor, name: str) -> None:
        self._recorder.label(tensor, Category.TEMPORARY, name)


def _count_graphs(count: int) -> str:
    return f"torch.compile: graphs compiled for the GPU, recompilations included: {count}."
