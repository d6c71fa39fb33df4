"""The module that a plan makes of a model."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from fxmem.planning.plan import Plan
from fxmem.tracing.contexts import Autocast, read_autocast
from fxmem.tracing.fxgraph import SURROUNDINGS
from fxmem.tracing.signatures import Kind, describe_value
from fxmem.tracing.tracer import is_leaf
from fxmem.transform.arguments import (
    Argument,
    find_mismatch,
    list_expected,
    list_names,
    name_arguments,
    write_sizes,
)
from fxmem.transform.calls import ModelCall
from fxmem.transform.codegen import SEGMENTS, SegmentCodeGen
from fxmem.transform.retracing import is_graph_of
from fxmem.transform.settings import Place, Settings, watch_reads
from fxmem.transform.surroundings import MISCOMPILED, is_normalised
from fxmem.transform.walk import Walk
from fxmem.transform.warning import warn_caller

_Surroundings = tuple[Autocast, tuple[Kind, ...]]
"""What is autocast to, and what the parameters are."""
_SHARED = (
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_modules",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)
"""What the planned module has in common with the model, and not a copy of."""
_REPLACED = (
    "modules of the model were replaced since the plan was applied: this step runs without it"
)


class PlannedModule(fx.GraphModule):
    """A model whose training step, or whose inference, runs by a plan.

    Parameters, buffers and submodules are the model's own. In calls that the plan is not for (in
    ``eval()`` or without gradients, or else in all but these) the model's own ``forward`` runs; so
    it does, with a warning, for arguments that the graph was not traced for, and for sizes by which
    the model's code decides otherwise. What is not found here is looked up in the model.

    Attributes:
        original: The model.
        plan_mode: ``"train"`` or ``"infer"``: the calls that the plan is for.
        plan: The plan, where :func:`fxmem.apply` was given one.
    """

    original: nn.Module
    plan_mode: str
    _walk: Walk
    _expected: tuple[Argument, ...]
    _names: tuple[str, ...] | None
    _coded: tuple[tuple[str, nn.Module], ...]
    _fits: dict[tuple[Any, ...], bool]
    _settings: Settings
    _unread: set[Place]
    _decisive: set[Place]
    _is_unsure: bool
    _runs_again: bool
    _is_miscompiled: bool
    _is_replaced: bool
    _described: tuple[Any, ...]
    _surroundings: _Surroundings

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
        self.__dict__["original"] = model
        self.__dict__["plan_mode"] = mode
        self.__dict__["size_hint"] = size_hint
        for name in _SHARED:
            self.__dict__[name] = model.__dict__[name]
        self.__dict__["_fits"] = {}
        self.remember(plan)
        self.training = model.training
        graph.set_codegen(SegmentCodeGen())  # which a pickled graph comes without
        self.graph = graph

    def recompile(self) -> Any:
        """Writes the code of the graph, and puts the choice of what to run before it."""
        code = super().recompile()
        own: Any = type(self)
        model = self.__dict__.get("original")
        if model is not None:
            own._run_plan = own.forward
            own.forward = _make_forward(model)
            for name in _list_special(type(model)):
                setattr(own, name, _hand_over(name))
            # What each call asks of the graph, as what a compiler can follow.
            nodes = [*self.graph.nodes]
            called = frozenset(str(n.target) for n in nodes if n.op == "call_module")
            walk = self.__dict__["_walk"] = Walk(self, called)
            self.__dict__["_expected"] = list_expected(nodes)
            self.__dict__["_names"] = list_names(model)
            self.__dict__["_coded"] = _list_coded(model)
            self._take_settings()
            self.__dict__["_is_unsure"] = False
            self.__dict__["_is_replaced"] = False
            self.__dict__["_runs_again"] = any(node.meta.get(SEGMENTS) for node in nodes)
            self.__dict__["_described"] = self._describe_modules()
            self.__dict__["_is_miscompiled"] = self._runs_again and is_normalised(walk.modules)
            traced = [node.meta[SURROUNDINGS] for node in nodes if SURROUNDINGS in node.meta]
            now = read_autocast(), walk.list_kinds()
            self.__dict__["_surroundings"] = traced[0] if traced else now
        return code

    @property
    def _is_full_backward_hook(self) -> bool | None:
        """What the model's backward hooks are, which are this module's too."""
        own: bool | None = self.__dict__["original"].__dict__.get("_is_full_backward_hook")
        return own

    @_is_full_backward_hook.setter
    def _is_full_backward_hook(self, value: bool | None) -> None:
        original = self.__dict__.get("original")
        if original is not None:
            original.__dict__["_is_full_backward_hook"] = value

    def remember(self, plan: Plan | None) -> None:
        """Has the plan as an attribute, unless the model has another of that name."""
        if plan is not None and not hasattr(self.original, "plan"):
            self.__dict__["plan"] = plan

    def train(self, mode: bool = True) -> PlannedModule:
        """As the model's own ``train``, which may leave some of its modules in another mode."""
        self.original.train(mode)
        self.training = self.original.training
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "original" not in self.__dict__:
                raise
            return getattr(self.__dict__["original"], name)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the graph does not know the module that it belongs to.
        arguments = self.original, copy.deepcopy(self.graph), self.plan_mode
        settings = self.__dict__.get("plan"), self.size_hint, self._differs()
        return _restore, (*arguments, *settings, self._described)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedModule:
        original, graph = copy.deepcopy(self.original, memo), copy.deepcopy(self.graph)
        copied = _restore(
            original,
            graph,
            self.plan_mode,
            self.__dict__.get("plan"),
            self.size_hint,
            self._differs(),
            self._described,
        )
        memo[id(self)] = copied
        return copied

    def choose_run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """What the graph takes of a call's arguments; None where the model's own forward runs."""
        is_train = self.plan_mode == "train"
        if self.training is not is_train or torch.is_grad_enabled() is not is_train:
            return None
        if self._is_miscompiled and torch.compiler.is_compiling():
            warn_caller(MISCOMPILED)
            return None
        if self._walk.update():
            self._meet_modules()
        hooked = self._walk.find_hooked()
        if hooked:
            warn_caller(
                f"the plan's graph does not call {hooked}, which has hooks: this step runs without"
                " it (a plan of style 'modules' calls it)"
            )
            return None
        switched = [n for n, module in self._coded if n and module.training is not is_train]
        if switched:
            warn_caller(
                f"the plan's graph has {switched[0]} in the mode of the model, and its code may ask"
                " for it: this step runs without the plan (one of style 'modules' runs that code)"
            )
            return None
        if self._describe_modules() != self._described:
            warn_caller(_REPLACED)
            return None
        given = name_arguments(self.original, self._names, args, kwargs)
        mismatch = find_mismatch(self._expected, given)
        if mismatch:
            warn_caller(
                f"the plan was made for other arguments ({mismatch}): this step runs without it"
            )
            return None
        changed = [place for place in self._settings.find_changed() if place not in self._unread]
        if not self._fits_call(given, changed, args, kwargs):
            if not torch.compiler.is_compiling():
                warn_caller(self._explain(given, changed))
            return None
        return [given.get(argument.name, argument.constant) for argument in self._expected]

    def _meet_modules(self) -> None:
        """Takes what others put in the place of modules whose code was traced for unknown."""
        coded = _list_coded(self.original)
        if coded != self._coded:
            self.__dict__["_coded"] = coded
            self._take_settings()
            self.__dict__["_fits"] = {}
            self.__dict__["_is_unsure"] = self.__dict__["_is_replaced"] = True

    def _describe_modules(self) -> tuple[Any, ...]:
        """Their classes, and how many buffers they have, which hooks on weights add to."""
        return tuple(map(type, self._walk.modules[1:])), self._walk.count_buffers()

    def _take_settings(self) -> None:
        self.__dict__["_settings"] = Settings(self._coded)
        self.__dict__["_unread"] = set()
        self.__dict__["_decisive"] = set()

    def _fits_call(
        self,
        given: Mapping[str, Any],
        changed: Sequence[Place],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> bool:
        """Whether the graph is what the model's code does for these sizes and attributes."""
        taken = [argument for argument in self._expected if not argument.is_constant]
        described = tuple(describe_value(given[argument.name]) for argument in taken)
        surroundings = read_autocast(), self._walk.list_kinds()
        is_known = described == tuple(argument.signature for argument in taken)
        is_known = is_known and surroundings == self._surroundings
        if is_known and not changed and not self._is_unsure:
            return True
        if not self._decisive.isdisjoint(changed):
            return False
        if torch.compiler.is_compiling():  # nothing can be traced while something is
            return False
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            return not changed  # an analysis, whose sizes have to be those of the plan
        key = described, surroundings, self._settings.read_values(changed)
        if key not in self._fits:
            self._fits[key] = self._trace_again(changed, args, kwargs)
        if self._fits[key] and not changed:
            self.__dict__["_is_unsure"] = self.__dict__["_is_replaced"] = False
        return self._fits[key]

    def _trace_again(
        self, changed: Sequence[Place], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        with watch_reads() as seen:
            fits = is_graph_of(
                self.graph, self.original, args, kwargs, self.plan_mode, self.size_hint
            )
        read = {place for place in changed if (self._settings.find_type(place), place[1]) in seen}
        if fits:  # what the code does not read may change with every step
            self._unread.update(place for place in changed if place not in read)
        else:
            self._decisive.update(read)
        return fits

    def _explain(self, given: Mapping[str, Any], changed: Sequence[Place]) -> str:
        """Why a call is not the graph's."""
        if self._is_replaced:
            return _REPLACED
        autocast, kinds = self._surroundings
        if changed:
            difference = f"{'.'.join(filter(None, changed[0]))} is not what it was for the plan"
        elif read_autocast() != autocast:
            difference = "autocast is not what it was for the plan"
        elif self._walk.list_kinds() != kinds:
            difference = "which parameters want gradients, or their dtypes, is not as for the plan"
        else:
            return (
                "for arguments of these sizes the model's code does other things than for those of"
                f" the plan ({write_sizes(given)}): this step runs without it"
            )
        return (
            f"{difference}, and the model's code may do other things with it: this step runs"
            " without the plan (one of style 'modules' runs that code)"
        )

    def _differs(self) -> bool:
        """Whether attributes are other than for the plan, which a copy cannot see."""
        if self._walk.update():
            self._meet_modules()
        return self._is_unsure or not self._unread.issuperset(self._settings.find_changed())


def _restore(
    model: nn.Module,
    graph: fx.Graph,
    mode: str,
    plan: Plan | None,
    size_hint: int | None,
    is_unsure: bool,
    described: tuple[Any, ...],
) -> PlannedModule:
    """A copy of a planned module; where attributes differed, its first call traces the model."""
    planned = PlannedModule(model, graph, mode, plan, size_hint)
    planned.__dict__["_is_unsure"] = is_unsure
    planned.__dict__["_described"] = described
    return planned


def _has_own_code(module: nn.Module) -> bool:
    """Whether a module's code was traced and is none of PyTorch's, which only calls others."""
    return not is_leaf(module) and not type(module).__module__.startswith("torch.nn")


def _list_coded(model: nn.Module) -> tuple[tuple[str, nn.Module], ...]:
    """By name, the modules whose own code was traced."""
    return tuple((name, part) for name, part in model.named_modules() if _has_own_code(part))


def _list_special(kind: type) -> list[str]:
    """What Python looks up in a class, as ``len`` does: that of containers, and not of modules."""
    return [
        name
        for name in dir(kind)
        if name.startswith("__")
        and not hasattr(nn.Module, name)
        and inspect.isfunction(getattr(kind, name))
    ]


def _hand_over(name: str) -> Callable[..., Any]:
    def call(self: PlannedModule, *args: Any) -> Any:
        return getattr(self.original, name)(*args)

    return call


def _make_forward(model: nn.Module) -> Callable[..., Any]:
    """A ``forward`` with the signature of the model's."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        values = self.choose_run(args, kwargs)
        if values is None:
            return self.original.forward(*args, **kwargs)
        if torch.compiler.is_compiling() or not self._runs_again:
            return self._run_plan(*values)
        with ModelCall(self._walk).enter():
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
