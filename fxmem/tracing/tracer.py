"""The tracer, which runs the user's own Python on fake tensors while the FX graph is built.

Nothing but a list of calls is taken from the run: no tensor is held, so storages live exactly
as long as they do in eager mode. A node is a leaf module, a torch function or method, a
user-defined autograd Function, a checkpointed region, or what ``fully_shard`` does before a module
to gather its parameters; nothing is seen inside one.

Follows ``torch/fx/_symbolic_trace.py`` (``Tracer.is_leaf_module``, patching of
``nn.Module.__call__``), with a ``TorchFunctionMode`` in the place of proxies.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeAlias

import torch
import torch.utils.checkpoint
from torch import nn

from fxmem.fakes.branches import find_passing_answer
from fxmem.fakes.containers import iterate_tensors
from fxmem.fakes.values import comes_of_held
from fxmem.graph import Phase, SourceLocation
from fxmem.patching import patch
from fxmem.source import find_source
from fxmem.tracing.calls import CallLog
from fxmem.tracing.compiled import read_fqn
from fxmem.tracing.fxgraph import GraphBuilder, describe_function
from fxmem.tracing.modules import CALLED_HOOKS, is_leaf, is_left_out
from fxmem.tracing.nodes import Call, NodeLog, TracedNode
from fxmem.tracing.sizes import make_shape
from fxmem.tracing.state import ForwardState

_BACKWARDS = frozenset({torch.Tensor.backward, torch.autograd.backward})
_SIZE_QUERIES = frozenset({"shape", "size", "numel", "nelement"})
_TENSOR_PROPERTIES = frozenset({"T", "mT", "H", "mH", "data", "grad", "real", "imag"})
_HOOKS = frozenset(
    {"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "grad_fn"}
)
"""Attributes of a tensor that lead to what backward does with it, which is no part of a graph."""

_SHARDING = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_COMPILED = "torch._functorch._aot_autograd.runtime_wrappers"
_GENERATORS = (
    "_checkpoint_without_reentrant_generator_impl",  # from 2.14 on: fn, args, kwargs, options
    "_checkpoint_without_reentrant_generator",  # fn, five options, *args, **kwargs
)
_REGION = "a checkpointed region calls a function that no graph holds"


def run_segment(run: Callable[..., Any], *inputs: Any) -> Any:
    """Runs a segment that a plan has recomputed in backward; to tracers one node."""
    return run(*inputs)


class NodeListener(Protocol):
    """Is told which node is running."""

    def enter_node(self, index: int) -> None: ...

    def exit_node(self, index: int, result: Any) -> int: ...  # answers how many operators it ran

    def find_storages(self, value: Any) -> tuple[int, ...]: ...  # of the tensors in it


WatchRoot: TypeAlias = Callable[[Any, Any], AbstractContextManager[Callable[[Any], None]]]
"""Makes the context of a call with positional and keyword arguments, which is told its result."""


@contextmanager
def _leave_out(*_: Any, **__: Any) -> Iterator[Callable[[Any], None]]:
    yield lambda result: None


class _Nesting(threading.local):
    """Where a thread is in the model; only the one that traces makes nodes."""

    scopes: Sequence[str] = ("",)
    opaque_depth = 1


class Tracer(torch.overrides.TorchFunctionMode):
    """Builds the graph of a model on fake tensors while its code runs.

    Sizes that the code asks for stay nodes of the graph where they are symbolic (the ``fx``
    frontend), else they become constants (the ``record`` frontend). Without a graph the nodes
    alone are noted.
    """

    def __init__(
        self,
        model: nn.Module,
        listener: NodeListener,
        *,
        symbolic_sizes: bool = False,
        builds_graph: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.builder = GraphBuilder(model) if builds_graph else None
        self._log = NodeLog(model, self.builder)
        self.calls = CallLog(listener.find_storages, self._log)
        self._listener = listener
        self._symbolic_sizes = symbolic_sizes
        self._phase: Phase | None = None  # None where no nodes are made
        modules = reversed([*model.named_modules()])
        self._fqns = {id(module): read_fqn(fqn) for fqn, module in modules}
        self._entered: set[str] = set()
        self._nesting = _Nesting()
        self._watch_root: WatchRoot | None = None

    @property
    def _scopes(self) -> Any:
        return self._nesting.scopes

    @_scopes.setter
    def _scopes(self, scopes: list[str]) -> None:
        self._nesting.scopes = scopes

    @property
    def _opaque_depth(self) -> int:
        return self._nesting.opaque_depth

    @_opaque_depth.setter
    def _opaque_depth(self, depth: int) -> None:
        self._nesting.opaque_depth = depth

    @property
    def nodes(self) -> list[TracedNode]:
        """The nodes so far."""
        return self._log.nodes

    def set_phase(self, phase: Phase | None) -> None:
        """Begins a phase, in which what the loop calls makes nodes; None for no nodes."""
        self._phase = phase
        self._scopes = ["loss" if phase is Phase.LOSS else ""]

    def add_compiled(
        self, fqn: str, target: str, source: SourceLocation | None
    ) -> TracedNode | None:
        """Adds a node of compiled code, whose module is seen from the one that runs."""
        if self._phase is None or self._opaque_depth:
            return None
        phase = Phase.LOSS if self._phase is Phase.LOSS else Phase.FORWARD
        return self._log.add_compiled(f"{self._scopes[-1]}.{fqn}".strip("."), target, source, phase)

    @contextmanager
    def be_silent(self, depth: int = 1) -> Iterator[None]:
        """Makes no nodes within; with a depth of 0 makes them again."""
        before, self._opaque_depth = self._opaque_depth, depth and self._opaque_depth + depth
        try:
            yield
        finally:
            self._opaque_depth = before

    @contextmanager
    def trace_model(self, args: Any, kwargs: Any) -> Iterator[Callable[[Any], None]]:
        """Traces a call of the model, which runs within.

        Yields:
            A function to be called with the result.
        """
        if self.nodes:
            self._give_up("the loop calls the model more than once")
            self.calls.hidden.update(self._fqns.values())
            yield lambda output: None
            return
        if self.builder is not None:
            self.builder.begin(args, kwargs)
        self._log.begin(args, kwargs)
        state = ForwardState(self.model) if self._symbolic_sizes else None

        def end(output: Any) -> None:
            if self.builder is not None:
                self.builder.end(output, frozenset(self._entered))
            if state is not None:
                self._give_up(state.find_change())

        yield end

    def _give_up(self, reason: str) -> None:
        """Notes why no graph can be replayed."""
        if self.builder is not None:
            self.builder.give_up(reason)

    def _give_up_here(self, reason: str) -> None:
        """Says of the line that is running why no graph can be replayed."""
        if self.builder is not None and self._phase is Phase.FORWARD:
            source = find_source()
            self._give_up(f"{reason} at {source}" if source else reason)

    # -- functions -----------------------------------------------------------------------------

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._phase is None or self._opaque_depth:
            return func(*args, **kwargs)
        if func in _BACKWARDS:
            with self.be_silent():
                return func(*args, **kwargs)
        op, target, label = describe_function(func)
        if label in _SIZE_QUERIES:
            return self._query_size(func, label, args, kwargs)
        if label in _HOOKS:
            self._give_up_here(f"it calls {label} of a tensor")
        if target is getattr and label not in _TENSOR_PROPERTIES:
            return func(*args, **kwargs)
        return self._run_node(Call(op, target, label, self._scopes[-1], func, args, kwargs))

    def _query_size(
        self, func: Callable[..., Any], label: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        answer = func(*args, **kwargs)
        origin = self._log.find_origin(args[0])
        if not self._symbolic_sizes or origin is None or isinstance(args[0], nn.Parameter):
            return answer
        if label in ("numel", "nelement"):
            return math.prod(make_shape(args[0].shape, origin))
        shape = make_shape(args[0].shape, origin)
        if label == "shape" or not (len(args) > 1 or kwargs):
            return shape
        return shape[args[1] if len(args) > 1 else kwargs["dim"]]

    def _run_node(self, call: Call) -> Any:
        """Runs one node; nothing inside it is seen, the bookkeeping neither."""
        index = len(self.nodes)
        self._opaque_depth += 1
        try:
            self._listener.enter_node(index)
            result = call.function(*call.args, **call.kwargs)
            operators = self._listener.exit_node(index, result)
            has_tensor = next(iterate_tensors(result), None) is not None
            if operators and not has_tensor and result is not None:
                # The code was told of the values of tensors, and goes on as they are now. (A frame
                # that a variable held would be a cycle, and keep the arguments alive.)
                is_bool = isinstance(result, bool)
                is_check = is_bool and find_passing_answer(sys._getframe(1)) is not None
                if not is_check and comes_of_held((call.args, call.kwargs), result):
                    self._give_up_here("a value that may change decides")
            if operators or has_tensor:
                self._log.add(call, result, self._phase or Phase.FORWARD)
            elif call.target in (setattr, delattr):
                self._give_up_here(f"it sets {call.label} of a tensor")
        finally:
            self._opaque_depth -= 1
        return result

    # -- calls that are replaced while the user's code runs --------------------------------------

    @contextmanager
    def trace(self, watch_root: WatchRoot | None = None) -> Iterator[None]:
        """Traces torch functions, calls of modules, autograd Functions and checkpoints.

        Args:
            watch_root: Makes the context in which the model is called.
        """
        self._watch_root, self._opaque_depth, self._scopes = watch_root, 0, [""]
        checkpointing: Any = torch.utils.checkpoint
        apply: Any = torch.autograd.Function.__dict__["apply"]
        name = next(each for each in _GENERATORS if hasattr(checkpointing, each))
        generator = getattr(checkpointing, name)

        def traced_apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            run = apply.__get__(None, function)
            is_compiled = function.__module__ == _COMPILED  # which names nodes of its own
            if self._phase is None or self._opaque_depth or is_compiled:
                return run(*args, **kwargs)
            is_reentrant = function is checkpointing.CheckpointFunction
            label = "checkpoint" if is_reentrant else function.__name__
            scope = self._scopes[-1]
            return self._run_node(Call("call_function", run, label, scope, run, args, kwargs))

        def traced_segment(run: Callable[..., Any], *inputs: Any) -> Any:
            if self._phase is None or self._opaque_depth:
                return run(*inputs)
            self._give_up(_REGION)
            target, scope = checkpointing.checkpoint, self._scopes[-1]
            return self._run_node(
                Call("call_function", target, "checkpoint", scope, run, inputs, {})
            )

        def traced_checkpoint(*arguments: Any, **kwargs: Any) -> Iterator[None]:
            return self._call_checkpoint(generator, arguments, kwargs)

        sharding: Any = sys.modules.get(_SHARDING)
        group: Any = sharding.FSDPParamGroup if sharding is not None else None
        gather: Any = getattr(group, "pre_forward", None)

        def traced_gather(*arguments: Any) -> Any:
            if self._phase is None or self._opaque_depth:
                return gather(*arguments)
            run = functools.partial(gather, *arguments[:2])  # the group and its module
            scope = self._scopes[-1]
            return self._run_node(
                Call("call_function", gather, "all_gather", scope, run, arguments[2:], {})
            )

        patches: dict[Any, dict[str, Any]] = {
            nn.Module: {"__call__": self._make_call(nn.Module.__call__)},
            torch.autograd.Function: {"apply": classmethod(traced_apply)},
            checkpointing: {name: traced_checkpoint},
            sys.modules[__name__]: {"run_segment": traced_segment},
        }
        if group is not None:
            patches[group] = {"pre_forward": traced_gather}
        try:
            with patch(patches), self:
                yield
        finally:
            self._watch_root = None

    def _make_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Makes what takes the place of ``nn.Module.__call__``: one frame for each module."""

        def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            """Runs a leaf as a node, and enters other modules."""
            if module is self.model and self._watch_root is not None:
                watch_root, self._watch_root = self._watch_root, None  # a model may call itself
                try:
                    with watch_root(args, kwargs) as end:
                        result = call_module(module, *args, **kwargs)
                        end(result)
                        return result
                finally:
                    self._watch_root = watch_root
            if self._phase is None:
                return call(module, *args, **kwargs)
            fqn = self._fqns.get(id(module))
            if fqn is not None and (self._opaque_depth or self._phase is not Phase.FORWARD):
                self.calls.hidden.add(fqn)
            if self._opaque_depth:
                return call(module, *args, **kwargs)
            if fqn is None:  # a criterion, or a module made on the fly: no part of the root
                scope, leaf = f"{self._scopes[-1]}.{type(module).__name__}".strip("."), False
            else:
                scope, leaf = fqn, module is not self.model and is_leaf(module)
            is_part = fqn is not None and self._phase is Phase.FORWARD and module is not self.model
            if is_part and not leaf:
                self._entered.add(scope)
                if any(is_left_out(getattr(module, key)) for key in CALLED_HOOKS):
                    self._give_up(f"{fqn} has hooks, which no graph calls")
            is_logged = is_part and self.builder is not None
            watch = self.calls.watch if is_logged else _leave_out
            with watch(module, scope, args, kwargs, is_leaf=leaf) as end:
                if leaf:
                    run, label = functools.partial(call, module), type(module).__name__
                    node = Call("call_module", fqn, label, scope, run, args, kwargs)
                    result = self._run_node(node)
                else:
                    self._scopes.append(scope)
                    try:
                        result = call(module, *args, **kwargs)
                    finally:
                        self._scopes.pop()
                end(result)
            return result

        return call_module

    def _call_checkpoint(
        self,
        generator: Callable[..., Iterator[None]],
        arguments: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Iterator[None]:
        """Takes the place of the generator around a non-reentrant checkpoint: one node.

        The region runs between the two steps of the generator, in the frame that drives it,
        which is where its result is found.
        """
        steps = generator(*arguments, **kwargs)
        if self._phase is None or self._opaque_depth:
            yield from steps
            return
        index, fqn = len(self.nodes), self._scopes[-1]
        self._opaque_depth += 1
        try:
            self._listener.enter_node(index)
            yield from steps
            frame = inspect.currentframe()
            caller = frame.f_back if frame else None
            result = caller.f_locals.get("ret") if caller else None
            del frame, caller
            self._listener.exit_node(index, result)
            self._give_up(_REGION)
            # Not the region itself: it may hold tensors, as ``functools.partial`` does.
            run = torch.utils.checkpoint.checkpoint
            inputs = (
                arguments[1:] if generator.__name__ == _GENERATORS[0] else (arguments[6:], kwargs)
            )
            call = Call("call_function", run, "checkpoint", fqn, run, *inputs)
            self._log.add(call, result, self._phase or Phase.FORWARD)
        finally:
            self._opaque_depth -= 1
