"""The module that a plan makes of a model."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from fxmem.applying.calls import ModelCall
from fxmem.applying.codegen import SEGMENTS, SegmentCodeGen
from fxmem.applying.judgement import Judgement, State
from fxmem.applying.overrides import (
    check_model,
    hand_over,
    list_hidden,
    list_overrides,
    list_special,
    look_up,
)
from fxmem.applying.surroundings import MISCOMPILED, is_normalised
from fxmem.applying.warning import warn_caller
from fxmem.planning.plan import Plan
from fxmem.tracing.hooks import HOOK_TABLES

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
"""What the planned module has in common with the model, and not a copy of."""


class PlannedModule(fx.GraphModule):
    """A model whose training step, or whose inference, runs by a plan.

    Parameters, buffers and submodules are the model's own. In calls that the plan is not for (in
    ``eval()`` or without gradients, or else in all but these) the model's own ``forward`` runs; so
    it does, with a warning, for arguments that the graph was not traced for, and for sizes by which
    the model's code decides otherwise. What is not found here is looked up in the model, and what
    is set here is set there.

    Attributes:
        original: The model.
        plan_mode: ``"train"`` or ``"infer"``: the calls that the plan is for.
        plan: The plan, where :func:`fxmem.apply` was given one.
    """

    _fxmem_original: nn.Module
    _fxmem_mode: str
    _fxmem_size_hint: int | None
    _fxmem_hidden: frozenset[str]
    _judgement: Judgement
    _runs_again: bool
    _is_miscompiled: bool

    def __init__(
        self,
        model: nn.Module,
        graph: fx.Graph,
        mode: str = "train",
        plan: Plan | None = None,
        size_hint: int | None = None,
    ) -> None:
        super().__init__({}, _make_empty_graph(), class_name=type(model).__name__)
        # Not as a submodule: its parameters would be there twice.
        self.__dict__["_fxmem_original"] = model
        self.__dict__["_fxmem_mode"] = mode
        self.__dict__["_fxmem_size_hint"] = size_hint
        check_model(model, self._list_taken())
        for name in _SHARED:
            self.__dict__[name] = model.__dict__[name]
        self._fxmem_remember(plan)
        graph.set_codegen(SegmentCodeGen())  # which a pickled graph comes without
        self.graph = graph

    def recompile(self) -> Any:
        """Writes the code of the graph, and puts the choice of what to run before it."""
        code = super().recompile()
        own: Any = type(self)
        model = self.__dict__.get("_fxmem_original")
        if model is not None:
            own._run_plan = own.forward
            own.forward = _make_forward(model)
            for name in (*list_special(type(model)), *list_overrides(model)):
                setattr(own, name, hand_over(name))
            hidden = list_hidden(model, self._list_taken())
            self.__dict__["_fxmem_hidden"] = hidden
            for name in hidden - {"recompile"}:  # which is called here
                setattr(own, name, look_up(name))
            self.__dict__["_judgement"] = judgement = Judgement(
                self, model, self._graph, self._fxmem_mode, self._fxmem_size_hint
            )
            runs_again = any(node.meta.get(SEGMENTS) for node in self._graph.nodes)
            self.__dict__["_runs_again"] = runs_again
            self.__dict__["_is_miscompiled"] = runs_again and is_normalised(judgement.walk.modules)
        return code

    @property
    def original(self) -> nn.Module:
        """The model."""
        return self._fxmem_original

    @property
    def plan_mode(self) -> str:
        """The calls that the plan is for."""
        return self._fxmem_mode

    # What swaps a module's class, or adds to it, as parametrizations do, does so to the model.
    @property
    def __class__(self) -> Any:
        original = self.__dict__.get("_fxmem_original")
        return type(self) if original is None else type(original)

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        self._fxmem_original.__class__ = kind

    @property
    def _is_full_backward_hook(self) -> bool | None:
        """What the model's backward hooks are, which are this module's too."""
        own: bool | None = self.__dict__["_fxmem_original"].__dict__.get("_is_full_backward_hook")
        return own

    @_is_full_backward_hook.setter
    def _is_full_backward_hook(self, value: bool | None) -> None:
        original = self.__dict__.get("_fxmem_original")
        if original is not None:
            original.__dict__["_is_full_backward_hook"] = value

    @property
    def training(self) -> bool:
        """The model's mode, which its own code asks for."""
        original = self.__dict__.get("_fxmem_original")
        mode: bool = True if original is None else original.training
        return mode

    @training.setter
    def training(self, value: bool) -> None:
        original = self.__dict__.get("_fxmem_original")
        if original is not None:  # not while this one is made
            original.training = value

    def _fxmem_remember(self, plan: Plan | None) -> None:
        """Has the plan as an attribute, unless the model has another of that name."""
        if plan is not None and not hasattr(self._fxmem_original, "plan"):
            self.__dict__["plan"] = plan

    def train(self, mode: bool = True) -> PlannedModule:
        """As the model's own ``train``, which may leave some of its modules in another mode."""
        self._fxmem_original.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_fxmem_original" not in self.__dict__:
                raise
            return getattr(self.__dict__["_fxmem_original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._has_own(name):
            super().__setattr__(name, value)
        else:
            setattr(self._fxmem_original, name, value)

    def __delattr__(self, name: str) -> None:
        if self._has_own(name):
            super().__delattr__(name)
        else:
            delattr(self._fxmem_original, name)

    def _has_own(self, name: str) -> bool:
        """Whether an attribute is this module's, and not one of the model that runs by it."""
        held = self.__dict__
        if name in held.get("_fxmem_hidden", ()):
            return False
        return "_fxmem_original" not in held or name in held or hasattr(type(self), name)

    def _list_taken(self) -> set[str]:
        """The names of this module's attributes."""
        return {*dir(type(self)), *self.__dict__, *PlannedModule.__annotations__}

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the graph does not know the module that it belongs to.
        arguments = self._fxmem_original, copy.deepcopy(self._graph), self._fxmem_mode
        settings = self.__dict__.get("plan"), self._fxmem_size_hint, self._judgement.read_state()
        return _restore, (*arguments, *settings)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedModule:
        memo[id(self)] = copied = self._copy(copy.deepcopy(self._fxmem_original, memo))
        return copied

    def __copy__(self) -> PlannedModule:
        return self._copy(copy.copy(self._fxmem_original))

    def _copy(self, original: nn.Module) -> PlannedModule:
        """This plan for a copy of the model."""
        return _restore(
            original,
            copy.deepcopy(self._graph),
            self._fxmem_mode,
            self.__dict__.get("plan"),
            self._fxmem_size_hint,
            self._judgement.read_state(),
        )

    def _replicate_for_data_parallel(self) -> Any:
        # The model's: a replica's tables must not be those of the model, as this one's are.
        original: Any = self._fxmem_original
        return original._replicate_for_data_parallel()

    def _fxmem_choose(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """What the graph takes of a call's arguments; None where the model's own forward runs."""
        is_train = self._fxmem_mode == "train"
        if self.training is not is_train or torch.is_grad_enabled() is not is_train:
            return None
        if self._is_miscompiled and torch.compiler.is_compiling():
            warn_caller(MISCOMPILED)
            return None
        return self._judgement.choose_values(args, kwargs)


def _restore(
    model: nn.Module,
    graph: fx.Graph,
    mode: str,
    plan: Plan | None,
    size_hint: int | None,
    state: State,
) -> PlannedModule:
    """A copy of a planned module."""
    planned = PlannedModule(model, graph, mode, plan, size_hint)
    planned._judgement.set_state(state)
    return planned


def _make_forward(model: nn.Module) -> Callable[..., Any]:
    """A ``forward`` with the signature of the model's."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        values = self._fxmem_choose(args, kwargs)
        if values is None:
            return self._fxmem_original.forward(*args, **kwargs)
        if torch.compiler.is_compiling() or not self._runs_again:
            return self._run_plan(*values)
        with ModelCall(self._judgement.walk).enter():
            return self._run_plan(*values)

    with contextlib.suppress(TypeError, ValueError):  # no signature
        signature = inspect.signature(model.forward)
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]
    forward.__doc__ = model.forward.__doc__
    return forward


def _make_empty_graph() -> fx.Graph:
    graph = fx.Graph()
    graph.output(None)
    return graph
