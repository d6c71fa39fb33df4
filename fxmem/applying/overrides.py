"""What of a model's class the module that runs by its plan has to have too."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx, nn

from fxmem.errors import UsageError

ROUTED = "_fxmem_routed"
"""Of a ``__call__`` that makes plans: what the class has for its own, if anything."""

_HINT = "use a plan of style 'modules'"
_CALLS = ("__call__", "_call_impl", "_wrapped_call_impl", "_slow_forward")
_OWN = frozenset({"forward", "train", "_replicate_for_data_parallel", *_CALLS})
"""What the planned module does itself."""
_WRITTEN = ("__repr__", "__dir__")
"""Of what Python looks up in classes, that which is no more than told of a model."""


def check_model(model: nn.Module, taken: set[str]) -> None:
    """Refuses what would not be called, or not be found under its name.

    Args:
        model: That a plan of a graph is applied to.
        taken: The names of the planned module's own attributes.

    Raises:
        UsageError: There is such.
    """
    for kind in _list_kinds(model):
        for name in _CALLS:
            call = vars(kind).get(name)
            if getattr(call, ROUTED, call) is not None:
                raise UsageError(
                    f"{kind.__name__} has a {name} of its own, which is not in the plan's graph",
                    hint=f"{_HINT}, or have that code in forward",
                )
    for table in (model._modules, model._parameters, model._buffers):
        for name in table:
            if name in taken and not hasattr(nn.Module, name):
                raise UsageError(
                    f"the model's {name} has the name of an attribute that planned models have",
                    hint=f"{_HINT}, or give it another name",
                )


def list_overrides(model: nn.Module) -> list[str]:
    """Methods that every module has, and that a model's class, or the model, has otherwise."""
    known = [vars(kind) for kind in _list_kinds(model)] + [vars(model)]
    names = {name for held in known for name, value in held.items() if callable(value)}
    return sorted(
        name
        for name in names - _OWN
        if inspect.isfunction(getattr(nn.Module, name, None))
        and (not name.startswith("__") or name in _WRITTEN)
    )


def list_special(kind: type) -> list[str]:
    """What Python looks up in a class, as ``len`` does: that of containers, and not of modules."""
    return [
        name
        for name in dir(kind)
        if name.startswith("__")
        and not hasattr(nn.Module, name)
        and inspect.isfunction(getattr(kind, name))
    ]


def list_hidden(model: nn.Module, taken: set[str]) -> frozenset[str]:
    """Attributes of a model, no tables of it, that have the name of one of the planned module's.

    Args:
        model: The model.
        taken: The names of the planned module's own attributes.
    """
    known = [vars(kind) for kind in _list_kinds(model)] + [vars(model)]
    names = {name for held in known for name in held if not name.startswith("_")}
    own = {*dir(nn.Module), *vars(model)["_modules"]}
    if isinstance(model, fx.GraphModule):
        own.update(dir(fx.GraphModule), vars(fx.GraphModule({}, fx.Graph())))
    return frozenset((names & taken) - own - {"training"})


def hand_over(name: str) -> Callable[..., Any]:
    """A method that is the model's."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = self._fxmem_original
        result = getattr(model, name)(*args, **kwargs)
        return self if result is model else result

    return call


def look_up(name: str) -> property:
    """An attribute that is the model's."""
    return property(lambda self: getattr(self._fxmem_original, name))


def _list_kinds(model: nn.Module) -> Iterator[type]:
    """The classes that are the model's and no other's."""
    is_graph = isinstance(model, fx.GraphModule)
    for kind in type(model).__mro__:
        is_made = is_graph and kind.__qualname__.endswith("GraphModuleImpl")
        if kind not in fx.GraphModule.__mro__ and not is_made:
            yield kind
