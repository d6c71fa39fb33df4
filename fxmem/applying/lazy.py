"""Models that get their plan at their first training step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from fxmem.applying.forwards import PlannedForward, set_forward
from fxmem.applying.module import PlannedModule
from fxmem.applying.overrides import ROUTED
from fxmem.applying.surroundings import is_transforming
from fxmem.applying.wrapping import find_original
from fxmem.errors import UsageError
from fxmem.planning.plan import Plan

_HELD = "_fxmem_held"
_BASE = "_fxmem_base"
"""Of a class whose models plan themselves: what it was made of for one model; else None."""
_NEVER = False
"""What is held where no plan is to be made, by copies neither."""

MakePlanned = Callable[[nn.Module, Any, Any], nn.Module]
"""From a model and the arguments of a step to the model with a plan."""


def plan_lazily(model: Any, make_planned: MakePlanned) -> Any:
    """A model, a class or a function, each of whose models plans itself."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        _route_calls(model, make_planned)
        return model
    if isinstance(model, nn.Module):
        vars(model).pop(_HELD, None)
        model.__class__ = _make_kind(type(model), make_planned)
        return model
    if not callable(model):
        raise UsageError(
            f"{type(model).__name__} is no model, and makes none",
            hint="a module, a class of modules, or a function that returns one",
        )

    @functools.wraps(model)
    def make(*args: Any, **kwargs: Any) -> Any:
        return plan_lazily(model(*args, **kwargs), make_planned)

    return make


def plans_itself(model: nn.Module) -> bool:
    """Whether a model's calls run by a plan that its first step makes, or made."""
    return hasattr(type(model), _BASE)


def release_model(model: nn.Module) -> None:
    """Has a model run its own code from now on, and so its copies.

    Args:
        model: One that plans itself.
    """
    base = vars(type(model)).get(_BASE)
    if base is not None:
        model.__class__ = base
    vars(model).pop(_HELD, None)
    if plans_itself(model):  # as all of its class
        vars(model)[_HELD] = _NEVER
    if isinstance(vars(model).get("plan"), Plan):
        del vars(model)["plan"]


def _make_kind(base: type[nn.Module], make_planned: MakePlanned) -> type[nn.Module]:
    """A class for one model, which is to all appearances the model's own."""

    def reduce(self: nn.Module, protocol: Any) -> Any:
        state = self.__getstate__()  # type: ignore[no-untyped-call]
        return _make_again, (base, make_planned), state

    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    kind: Any = type(base.__name__, (base,), {**names, "__reduce_ex__": reduce, _BASE: base})
    _route_calls(kind, make_planned)
    made: type[nn.Module] = kind
    return made


def _make_again(base: type[nn.Module], make_planned: MakePlanned) -> nn.Module:
    """What a copy, or what a file is read into, begins as."""
    kind = _make_kind(base, make_planned)
    return kind.__new__(kind)


def _route_calls(kind: type[nn.Module], make_planned: MakePlanned) -> None:
    """Has the calls of a class's models run by plans that the first of them makes."""
    own = vars(kind).get("__call__")
    if _BASE not in vars(kind):
        setattr(kind, _BASE, None)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        planned = _find_planned(self, args, kwargs, make_planned)
        if planned is not None:
            return planned(*args, **kwargs)
        if own is not None:
            return own(self, *args, **kwargs)
        above: Any = super(kind, self)
        return above.__call__(*args, **kwargs)

    setattr(call, ROUTED, own)
    kind.__call__ = call  # type: ignore[method-assign]


class _Held:
    """What a model was given as a plan; a copy of the model makes its own.

    Attributes:
        planned: The module that runs in the model's place; None where the model itself does.
    """

    def __init__(self, planned: nn.Module | None = None) -> None:
        self.planned = planned

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def _find_planned(
    model: nn.Module, args: Any, kwargs: Mapping[str, Any], make_planned: MakePlanned
) -> nn.Module | None:
    """What runs a call in the place of the model; None where the model itself does."""
    is_step = model.training and torch.is_grad_enabled()
    if not is_step or find_original(model) is not None:
        return None
    held: _Held | bool | None = vars(model).get(_HELD)
    if held is not None and _is_of(held, model):
        return held.planned if isinstance(held, _Held) else None
    # The call of a compiler, of a transform of functions, or of an analysis is no step.
    is_inner = torch.compiler.is_compiling() or is_transforming()
    leaves = () if is_inner else tree_leaves((args, kwargs))
    if not leaves or any(isinstance(leaf, FakeTensor) for leaf in leaves):
        return None
    if isinstance(vars(model).get("plan"), Plan):  # of what it is a copy of
        del vars(model)["plan"]
    planned = make_planned(model, args, kwargs)
    if not isinstance(planned, PlannedModule):
        if planned is not model:
            _become(model, planned)
        vars(model)[_HELD] = _Held()
        return None
    if not hasattr(model, "plan"):
        vars(model)["plan"] = planned.plan
    vars(model)[_HELD] = _Held(planned)
    return planned


def _is_of(held: _Held | bool, model: nn.Module) -> bool:
    """Whether what is held is a model's own, and not that of one that it is a copy of."""
    planned = held.planned if isinstance(held, _Held) else None
    return planned is None or planned._fxmem_original is model


def _become(model: nn.Module, planned: nn.Module) -> None:
    """Makes a model the one that a plan of modules has made of it.

    What its attributes lead to has to be what runs: a rate that is changed, a layer that is frozen.
    """
    original = object.__new__(type(model))
    vars(original).update({**vars(model), _HELD: _Held()})
    vars(model).update(vars(planned))
    planned.__dict__ = model.__dict__  # what the modules refer to as their parent
    forward: PlannedForward = vars(planned)["forward"]
    set_forward(model, forward.move(model, original))
