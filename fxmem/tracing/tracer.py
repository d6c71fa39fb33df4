"""The tracer: the user's own Python runs once, on fake tensors, while the FX graph is built.

Nothing but a list of calls is taken from the run: no tensor is held, so storages live exactly
as long as they do in eager mode. A node is a leaf module, a torch function or method, a
user-defined autograd Function, or a checkpointed region; nothing is seen inside one.

Follows ``torch/fx/_symbolic_trace.py`` (``Tracer.is_leaf_module``, patching of
``nn.Module.__call__``), with a ``TorchFunctionMode`` in the place of proxies.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import fx, nn

from fxmem.graph import Phase
from fxmem.tracing.calls import CallLog, patch_calls
from fxmem.tracing.fxgraph import ENTERED, describe_function, iterate_tensors
from fxmem.tracing.modules import is_leaf, sees_arguments
from fxmem.tracing.nodes import Call, NodeLog, TracedNode
from fxmem.tracing.sizes import make_numel, make_shape
from fxmem.tracing.source import find_source
from fxmem.tracing.state import ForwardState
from fxmem.tracing.values import comes_of_held, find_passing_answer

_SIZE_QUERIES = frozenset({"shape", "size", "numel", "nelement"})
_TENSOR_PROPERTIES = frozenset({"T", "mT", "H", "mH", "data", "grad", "real", "imag"})
_HOOKS = frozenset(
    {"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "grad_fn"}
)
"""Ways of a tensor to what backward does with it, which are no part of a graph."""


class NodeListener(Protocol):
    """What wants to know which node is running."""

    def enter_node(self, index: int) -> None:
        """The node with that index begins."""

    def exit_node(self, index: int, result: Any) -> int:
        """It has returned; answers how many operators it ran."""

    def find_storages(self, value: Any) -> tuple[int, ...]:
        """The indices of the storages that the tensors in a value lie on."""


class Tracer(torch.overrides.TorchFunctionMode):
    """Builds the graph of a model while its code runs.

    Args:
        model: The model, on fake tensors.
        listener: Told of every node that begins and ends.
        symbolic_sizes: Whether sizes that the code asks for stay nodes of the graph (the
            ``fx`` frontend) or become constants (the ``record`` frontend).

    Attributes:
        calls: The calls of modules so far.
    """

    def __init__(self, model: nn.Module, listener: NodeListener, *, symbolic_sizes: bool) -> None:
        super().__init__()
        self.model = model
        self.calls = CallLog(listener, lambda: len(self.nodes))
        self._log = NodeLog(model)
        self._listener = listener
        self._symbolic_sizes = symbolic_sizes
        self._phase = Phase.FORWARD
        self._fqns = {id(module): fqn for fqn, module in reversed([*model.named_modules()])}
        self._entered: set[str] = set()
        self._scopes = [""]
        self._opaque_depth = 0

    @property
    def nodes(self) -> list[TracedNode]:
        """What was traced so far."""
        return self._log.nodes

    @property
    def graph(self) -> fx.Graph:
        """The FX graph; it can be run where :attr:`reason` is empty."""
        return self._log.builder.graph

    @property
    def reason(self) -> str:
        """The first thing that the graph cannot express; empty while there is none."""
        return self._log.builder.reason

    def run_model(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls the model and traces it.

        Returns:
            What the model returns, on fake tensors.
        """
        self._log.begin(args, kwargs)
        state = ForwardState(self.model) if self._symbolic_sizes else None
        with self._tracing(Phase.FORWARD):
            output = self.model(*args, **kwargs)
        self._log.end(output)
        for node in self.graph.find_nodes(op="output"):
            node.meta[ENTERED] = frozenset(self._entered)
        if state is not None:
            self._log.builder.give_up(state.find_change())
        return output

    def run_loss(self, compute: Callable[[Any], Any], output: Any) -> Any:
        """Calls the loss function and traces it into nodes of the phase LOSS."""
        with self._tracing(Phase.LOSS):
            return compute(output)

    # -- nodes ---------------------------------------------------------------------------------

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._opaque_depth:
            return func(*args, **kwargs)
        op, target, label = describe_function(func)
        if label in _SIZE_QUERIES:
            return self._query_size(func, label, args, kwargs)
        if label in _HOOKS:
            self._give_up(f"it calls {label} of a tensor")
        if target is getattr and label not in _TENSOR_PROPERTIES:
            return func(*args, **kwargs)
        return self._run_node(Call(op, target, label, self._scopes[-1], func, args, kwargs))

    def _query_size(
        self, func: Callable[..., Any], label: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        answer = func(*args, **kwargs)
        origin = self._log.builder.find_origin(args[0])
        if not self._symbolic_sizes or origin is None or isinstance(args[0], nn.Parameter):
            return answer
        if label in ("numel", "nelement"):
            return make_numel(args[0].shape, origin)
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
                self._see_value(call, result)
            if operators or has_tensor:
                self._log.add(call, result, self._phase)
            elif call.target in (setattr, delattr):
                self._give_up(f"it sets {call.label} of a tensor")
        finally:
            self._opaque_depth -= 1
        return result

    def _see_value(self, call: Call, answer: Any) -> None:
        """The code was told of the values of tensors, and goes on as they are now."""
        is_check = isinstance(answer, bool) and find_passing_answer(sys._getframe(1)) is not None
        if not is_check and comes_of_held((call.args, call.kwargs), answer):
            self._give_up("a value that may change decides")

    def _give_up(self, reason: str) -> None:
        """Says of the line that is running why no graph can be replayed."""
        if self._phase is Phase.FORWARD:
            source = find_source()
            self._log.builder.give_up(f"{reason} at {source}" if source else reason)

    # -- what is patched while the user's code runs ---------------------------------------------

    @contextmanager
    def _tracing(self, phase: Phase) -> Iterator[None]:
        self._phase = phase
        self._scopes = ["loss" if phase is Phase.LOSS else ""]
        with self, patch_calls(self):
            yield

    def call_module(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Takes the place of ``nn.Module.__call__``: a leaf is a node, others are entered."""
        fqn = self._fqns.get(id(module))
        if self._opaque_depth:
            self._hide(fqn)
            return call(module, *args, **kwargs)
        if fqn is None:  # a criterion, or a module made on the fly: no part of the graph's root
            fqn = f"{self._scopes[-1]}.{type(module).__name__}".strip(".")
            return self._enter_module(call, module, fqn, args, kwargs)
        if self._phase is not Phase.FORWARD:
            self._hide(fqn)
        if module is not self.model and is_leaf(module):
            enter, leaf = self._run_leaf, True
        else:
            enter, leaf = self._enter_module, False

        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return enter(call, module, fqn, args, kwargs)

        if self._phase is not Phase.FORWARD or module is self.model:
            return run(module, *args, **kwargs)
        if not leaf:
            self._entered.add(fqn)
            if sees_arguments(module):
                self._log.builder.give_up(f"{fqn} has hooks, which no graph calls")
        return self.calls.run(run, module, fqn, args, kwargs, is_leaf=leaf)

    def _hide(self, fqn: str | None) -> None:
        if fqn is not None:
            self.calls.hidden.add(fqn)

    def _run_leaf(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        fqn: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            return call(module, *args, **kwargs)

        label = type(module).__name__
        return self._run_node(Call("call_module", fqn, label, fqn, run, args, kwargs))

    def _enter_module(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        fqn: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self._scopes.append(fqn)
        try:
            return call(module, *args, **kwargs)
        finally:
            self._scopes.pop()

    def call_autograd_function(
        self,
        apply: Callable[..., Any],
        function: type[torch.autograd.Function],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Takes the place of ``torch.autograd.Function.apply``: one node."""
        if self._opaque_depth:
            return apply(*args, **kwargs)
        is_reentrant = function is torch.utils.checkpoint.CheckpointFunction
        label = "checkpoint" if is_reentrant else function.__name__
        fqn = self._scopes[-1]
        return self._run_node(Call("call_function", apply, label, fqn, apply, args, kwargs))

    def call_segment(self, run: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        """Runs a segment of a planned model as one node, as a checkpoint by hand is one."""
        if self._opaque_depth:
            return run(*inputs)
        self._log.builder.give_up("a checkpointed region calls a function that no graph holds")
        target = torch.utils.checkpoint.checkpoint
        return self._run_node(
            Call("call_function", target, "checkpoint", self._scopes[-1], run, inputs, {})
        )

    def call_checkpoint(
        self,
        generator: Callable[..., Iterator[None]],
        settings: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Iterator[None]:
        """Takes the place of the generator around a non-reentrant checkpoint: one node.

        The region runs between the two steps of the generator, in the frame that drives it,
        which is where its result is found.
        """
        steps = generator(*settings, *args, **kwargs)
        if self._opaque_depth:
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
            self._log.builder.give_up("a checkpointed region calls a function that no graph holds")
            # Not the region itself: it may hold tensors, as ``functools.partial`` does.
            run = torch.utils.checkpoint.checkpoint
            self._log.add(
                Call("call_function", run, "checkpoint", fqn, run, args, kwargs),
                result,
                self._phase,
            )
        finally:
            self._opaque_depth -= 1
