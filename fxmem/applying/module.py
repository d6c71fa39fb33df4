"""The module that runs a model by a plan of its graph."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._C._functorch import peek_interpreter_stack

from fxmem.applying.codegen import SegmentCodeGen
from fxmem.applying.guard import AttributeGuard, InputGuard, Values
from fxmem.applying.runtime import NO_TRANSFORMS
from fxmem.applying.size_ranges import SizeRange
from fxmem.applying.warning import warn_caller
from fxmem.errors import UsageError
from fxmem.planning.plan import Plan
from fxmem.tracing.modules import HOOK_TABLES

_SHARED = (
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_modules",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    *HOOK_TABLES,
)
"""Tables that the planned module has in common with the model."""


class PlannedModule(fx.GraphModule):
    """A model whose training step, or whose inference, runs by a plan.

    Parameters, buffers, submodules and hooks are the model's own. Attributes that are not found
    here are looked up in the model, and set there. The model's own ``forward`` runs in the mode
    that the plan is not for and, with a :class:`fxmem.FxmemWarning`, in calls that differ from the
    traced one: :mod:`fxmem.applying.guard` has what is compared.

    Attributes:
        original: The model.
        plan: The plan, where :func:`fxmem.apply` was given one.
        plan_mode: ``"train"`` or ``"infer"``: the calls that the plan is for.
        plan_calls: The number of calls that ran by the plan.
    """

    original: nn.Module
    plan: Plan | None
    plan_mode: str
    plan_calls: int

    def __init__(
        self,
        model: nn.Module,
        graph: fx.Graph,
        mode: str = "train",
        ranges: Sequence[SizeRange] = (),
        plan: Plan | None = None,
        values: Values | None = None,
    ) -> None:
        empty = fx.Graph()
        empty.output(None)
        super().__init__({}, empty, class_name=type(model).__name__)
        # Not as a submodule: its parameters would be there twice.
        own = {"original": model, "plan": plan, "plan_mode": mode, "plan_calls": 0}
        _check_model(model, {*dir(type(self)), *self.__dict__, *own})
        tables = {name: model.__dict__[name] for name in _SHARED}
        self.__dict__.update(
            own, **tables, _is_full_backward_hook=model._is_full_backward_hook, _ranges=ranges
        )
        graph.set_codegen(SegmentCodeGen())  # which a pickled graph comes without
        self.__dict__["_inputs"] = InputGuard(model, graph, ranges)
        self.__dict__["_attributes"] = AttributeGuard(model, graph, values)
        self.graph = graph

    def recompile(self) -> Any:
        """Writes the code of the graph, and puts the guards before it."""
        code = super().recompile()
        own: Any = type(self)
        model = self.__dict__.get("original")
        if model is None:
            return code
        own._run_plan = own.forward
        own.forward = _make_forward(model)
        # Methods of every module that the model's class overrides, such as state_dict.
        kinds = [kind for kind in type(model).__mro__ if kind not in fx.GraphModule.__mro__]
        for name, method in vars(nn.Module).items():
            is_overridden = any(name in vars(kind) for kind in kinds)
            is_own = name.startswith("__") or name in ("forward", "train")
            if is_overridden and not is_own and inspect.isfunction(method):
                setattr(own, name, _hand_over(name))
        return code

    @property
    def training(self) -> bool:
        """The model's mode, which its own code asks for."""
        original = self.__dict__.get("original")
        mode: bool = True if original is None else original.training
        return mode

    @training.setter
    def training(self, value: bool) -> None:
        if "original" in self.__dict__:  # not while this one is made
            self.original.training = value

    def train(self, mode: bool = True) -> PlannedModule:
        """As the model's own ``train``, which may leave some of its modules in another mode."""
        self.original.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "original" not in self.__dict__:
                raise
            return getattr(self.__dict__["original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        held = self.__dict__
        if "original" not in held or name in held or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.original, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the graph does not know the module that it belongs to.
        graph = copy.deepcopy(self._graph)
        state = self.plan_mode, self._ranges, self.plan, self._attributes.values
        return PlannedModule, (self.original, graph, *state)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedModule:
        make, (original, *others) = self.__reduce__()
        memo[id(self)] = copied = make(copy.deepcopy(original, memo), *others)
        return copied  # type: ignore[no-any-return]

    def __copy__(self) -> PlannedModule:
        make, (original, *others) = self.__reduce__()
        return make(copy.copy(original), *others)  # type: ignore[no-any-return]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _choose_values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """Lists what the graph takes; None where the model's own forward runs."""
        is_train = self.plan_mode == "train"
        if self.training is not is_train or torch.is_grad_enabled() is not is_train:
            return None
        if peek_interpreter_stack() is not None:
            warn_caller(NO_TRANSFORMS)
            return None
        values: list[Any] = []
        difference = self._attributes.find_difference()
        if not difference:
            difference, values = self._inputs.compare(args, kwargs)
        if difference:
            warn_caller(f"{difference}: this step runs without the plan")
            return None
        self.__dict__["plan_calls"] += 1
        return values


def _make_forward(model: nn.Module) -> Callable[..., Any]:
    """Makes a ``forward`` with the signature of the model's."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        values = self._choose_values(args, kwargs)
        if values is None:
            return self.original.forward(*args, **kwargs)
        return type(self)._run_plan(self.original, *values)  # whose modules the graph calls

    with contextlib.suppress(TypeError, ValueError):  # no signature
        signature = inspect.signature(model.forward)
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]
    forward.__doc__ = model.forward.__doc__
    return forward


def _hand_over(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.original, name)(*args, **kwargs)
        return self if result is self.original else result

    return call


def _check_model(model: nn.Module, taken: set[str]) -> None:
    """Refuses a ``__call__`` that would not run, and names that the planned model needs."""
    if type(model).__call__ is not nn.Module.__call__ and not isinstance(model, fx.GraphModule):
        raise UsageError(
            f"{type(model).__name__} has a __call__ of its own, which is not in the plan's graph",
            hint="use style='modules', or move that code to forward",
        )
    for name in (*model._modules, *model._parameters, *model._buffers):
        if name in taken and not hasattr(nn.Module, name):
            raise UsageError(
                f"the model's {name} has the same name as an attribute of planned models",
                hint="use style='modules', or rename the attribute",
            )
