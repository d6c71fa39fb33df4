"""The tracer: the user's own Python runs once, on fake tensors, while the FX graph is built.

Nothing but a list of calls is taken from the run: no tensor is held, so storages live exactly
as long as they do in eager mode. A node is a leaf module, a torch function or method, a
user-defined autograd Function, or a checkpointed region; nothing is seen inside one.

Follows ``torch/fx/_symbolic_trace.py`` (``Tracer.is_leaf_module``, patching of
``nn.Module.__call__``), with a ``TorchFunctionMode`` in the place of proxies.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx, nn

from fxmem.graph import Phase, SourceLocation
from fxmem.tracing.calls import bind_arguments, patch_calls
from fxmem.tracing.contexts import read_context, run_within
from fxmem.tracing.forward_state import ForwardState
from fxmem.tracing.fxgraph import CONSTANT, NODE, GraphBuilder, describe_function, iterate_tensors
from fxmem.tracing.module_calls import CallLog
from fxmem.tracing.signatures import SIGNATURE, describe_value
from fxmem.tracing.sizes import make_numel, make_shape
from fxmem.tracing.source import find_source

_CONTAINERS = (
    nn.Sequential,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
"""torch.nn's own modules that only call others. torch.fx makes a leaf of all but the first, and
then a whole encoder is one node; see docs/decisions."""


class NodeListener(Protocol):
    """What wants to know which node is running."""

    def enter_node(self, index: int) -> None:
        """The node with that index begins."""

    def exit_node(self, index: int, result: Any) -> int:
        """It has returned; answers how many operators it ran."""

    def find_storages(self, value: Any) -> tuple[int, ...]:
        """The indices of the storages that the tensors in a value lie on."""


@dataclass(frozen=True, slots=True)
class TracedNode:
    """A node as the tracer sees it; the recording adds bytes and FLOPs.

    Attributes are those of :class:`fxmem.graph.Node`.
    """

    index: int
    name: str
    fqn: str
    op: str
    target: str
    phase: Phase
    shape: tuple[int, ...] | None
    dtype: str | None
    source: SourceLocation | None
    inputs: tuple[int, ...]


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is one node, as ``torch.fx.Tracer.is_leaf_module`` decides."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return module.__module__.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(
        module, _CONTAINERS
    )


class Tracer(torch.overrides.TorchFunctionMode):
    """Builds the graph of a model while its code runs.

    Args:
        model: The model, on fake tensors.
        listener: Told of every node that begins and ends.
        symbolic_sizes: Whether sizes that the code asks for stay nodes of the graph (the
            ``fx`` frontend) or become constants (the ``record`` frontend).

    Attributes:
        nodes: What was traced so far.
        calls: The calls of modules so far.
        reason: The first thing that the FX graph cannot express; empty while there is none.
    """

    def __init__(self, model: nn.Module, listener: NodeListener, *, symbolic_sizes: bool) -> None:
        super().__init__()
        self.model = model
        self.nodes: list[TracedNode] = []
        self.calls = CallLog(listener, lambda: len(self.nodes))
        self._listener = listener
        self._symbolic_sizes = symbolic_sizes
        self._builder = GraphBuilder(model)
        self._phase = Phase.FORWARD
        self._fqns = {id(module): fqn for fqn, module in reversed([*model.named_modules()])}
        self._scopes = [""]
        self._opaque_depth = 0
        self._occurrences: dict[str, int] = {}
        self._context = read_context()

    @property
    def reason(self) -> str:
        """Why the graph cannot be replayed; empty where it can."""
        return self._builder.reason

    def run_model(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls the model and traces it.

        Returns:
            What the model returns, on fake tensors.
        """
        self._add_placeholders(args, kwargs)
        self._context = read_context()
        state = ForwardState(self.model, is_leaf) if self._symbolic_sizes else None
        with self._tracing(Phase.FORWARD):
            output = self.model(*args, **kwargs)
        self._builder.set_output(output)
        if state is not None:
            self._builder.give_up(state.find_change())
        return output

    def run_loss(self, compute: Callable[[Any], Any], output: Any) -> Any:
        """Calls the loss function and traces it into nodes of the phase LOSS."""
        with self._tracing(Phase.LOSS):
            return compute(output)

    @property
    def graph(self) -> fx.Graph:
        """The FX graph; it can be run where :attr:`reason` is empty."""
        return self._builder.graph

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
        if target is getattr and label not in _TENSOR_PROPERTIES:
            return func(*args, **kwargs)
        return self._run_node(op, target, label, self._scopes[-1], func, args, kwargs)

    def _query_size(
        self, func: Callable[..., Any], label: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        answer = func(*args, **kwargs)
        origin = self._builder.find_origin(args[0])
        if not self._symbolic_sizes or origin is None or isinstance(args[0], nn.Parameter):
            return answer
        if label in ("numel", "nelement"):
            return make_numel(args[0].shape, origin)
        shape = make_shape(args[0].shape, origin)
        if label == "shape" or not (len(args) > 1 or kwargs):
            return shape
        return shape[args[1] if len(args) > 1 else kwargs["dim"]]

    def _run_node(
        self,
        op: str,
        target: Any,
        label: str,
        fqn: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Runs one node; nothing inside it is seen, the bookkeeping neither."""
        index = len(self.nodes)
        self._opaque_depth += 1
        try:
            self._listener.enter_node(index)
            result = func(*args, **kwargs)
            operators = self._listener.exit_node(index, result)
            if operators or next(iterate_tensors(result), None) is not None:
                self._add_node(op, target, label, fqn, func, args, kwargs, result)
        finally:
            self._opaque_depth -= 1
        return result

    def _add_node(
        self,
        op: str,
        target: Any,
        label: str,
        fqn: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        name = self._make_name(fqn if op == "call_module" else f"{fqn}.{label}".strip("."))
        if target in _ACCESSORS:
            args = (args[0], label, *args[1:])
        inputs = self._builder.find_inputs((args, kwargs))
        fx_node = None
        if self._phase is Phase.FORWARD:
            op, target = self._keep_context(op, target, func, args, kwargs, result)
            fx_node = self._builder.add_call(op, target, args, kwargs, name)
            fx_node.meta[NODE] = name
        index = len(self.nodes)
        self._builder.tag_result(result, index, fx_node)
        first = next(iterate_tensors(result), None)
        self.nodes.append(
            TracedNode(
                index=index,
                name=name,
                fqn=fqn,
                op=op,
                target=label,
                phase=self._phase,
                shape=None if first is None else tuple(map(int, first.shape)),
                dtype=None if first is None else str(first.dtype).removeprefix("torch."),
                source=find_source(),
                inputs=inputs,
            )
        )

    def _keep_context(
        self,
        op: str,
        target: Any,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> tuple[str, Any]:
        """What the graph calls so that it runs in the context in which the code has it."""
        outer, inner = self._context, read_context()
        if outer == inner:
            return op, target
        if outer.autocast == inner.autocast and not inner.grad:
            given = [*iterate_tensors((args, kwargs))]
            if op == "call_module":
                given += self.model.get_submodule(target).parameters()
            records = any(tensor.is_floating_point() for tensor in iterate_tensors(result))
            if not records or not any(tensor.requires_grad for tensor in given):
                return op, target  # autograd would not record it anyway
        within = (
            None if op == "call_module" or target in _ACCESSORS else run_within(func, outer, inner)
        )
        if within is None:
            kind = "autocast" if outer.autocast != inner.autocast else "gradients"
            self._builder.give_up(f"the code itself turns {kind} on or off")
            return op, target
        return "call_function", within

    def _make_name(self, candidate: str) -> str:
        seen = self._occurrences.get(candidate, 0)
        self._occurrences[candidate] = seen + 1
        return f"{candidate}_{seen}" if seen else candidate

    def _add_placeholders(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for name, value in bind_arguments(self.model, args, kwargs):
            index = len(self.nodes)
            fx_node = self._builder.add_placeholder(name)
            self._builder.tag_result(value, index, fx_node)
            first = next(iterate_tensors(value), None)
            if first is None:
                fx_node.meta[CONSTANT] = value
                continue
            fx_node.meta[SIGNATURE] = describe_value(value)
            self.nodes.append(
                TracedNode(
                    index=index,
                    name=self._make_name(name),
                    fqn="",
                    op="placeholder",
                    target=name,
                    phase=Phase.FORWARD,
                    shape=tuple(first.shape),
                    dtype=str(first.dtype).removeprefix("torch."),
                    source=None,
                    inputs=(),
                )
            )

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
        return self._run_node(
            "call_module",
            fqn,
            type(module).__name__,
            fqn,
            lambda *args, **kwargs: call(module, *args, **kwargs),
            args,
            kwargs,
        )

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
        label = function.__name__
        if label == "CheckpointFunction":  # torch.utils.checkpoint, reentrant
            label = "checkpoint"
        return self._run_node("call_function", apply, label, self._scopes[-1], apply, args, kwargs)

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
            self._builder.give_up("a checkpointed region calls a function that no graph holds")
            function = settings[0]
            self._add_node(
                "call_function", function, "checkpoint", fqn, function, args, kwargs, result
            )
        finally:
            self._opaque_depth -= 1


_ACCESSORS = (getattr, setattr, delattr)
_SIZE_QUERIES = frozenset({"shape", "size", "numel", "nelement"})
_TENSOR_PROPERTIES = frozenset({"T", "mT", "H", "mH", "data", "grad", "real", "imag"})
