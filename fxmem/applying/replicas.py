"""Copies of a model's modules as objects, which share all that the modules hold."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from fxmem.errors import UsageError
from fxmem.tracing.reach import LEAVES, find_held

_SHARED = frozenset(
    name for name, value in vars(nn.Module()).items() if name != "_modules" and value is not None
)
"""What every module has, such as tables of parameters and of hooks: taken over as it is."""

Replicas = Mapping[int, nn.Module]

Pairs = tuple[tuple[nn.Module, nn.Module], ...]
"""Modules, each with its copy."""

Lent = tuple[tuple[nn.Module, nn.Module, str], ...]
"""Modules, each with its copy and the name of a tensor that both hold as an attribute."""


def copy_modules(model: nn.Module) -> Replicas:
    """A copy of each module of a model, of its class and with its parameters, buffers and hooks.

    What refers to a module of the model in a list, a dict, a bound method and the like refers to
    the copy in the copy. Scripts are taken as they are.

    Args:
        model: The model.

    Returns:
        The copies by the ``id`` of what they are copies of.

    Raises:
        UsageError: An object that cannot be copied refers to a module, and would go on calling
            the original.
    """
    replicas = {id(module): _make_replica(module) for module in model.modules()}
    rewirer = _Rewirer(model, replicas)
    for fqn, module in model.named_modules():
        replica = replicas[id(module)]
        if replica is module:
            continue
        for name, value in vars(module).items():
            if name == "_modules":
                children = {k: None if v is None else replicas[id(v)] for k, v in value.items()}
                vars(replica)[name] = type(value)(children)
            elif name in _SHARED:
                vars(replica)[name] = value
            else:
                vars(replica)[name] = rewirer.rewire(value, f"{fqn}.{name}".strip("."))
    return replicas


def list_lent(pairs: Pairs) -> Lent:
    """Tensors that modules hold beside parameters and buffers, such as a normalised weight."""
    return tuple(
        (module, replica, name)
        for module, replica in pairs
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and module is not replica
    )


@contextmanager
def lend_tensors(lent: Lent) -> Iterator[None]:
    """Has only the copies hold some tensors for a while, and the modules what they are then.

    What forward puts in their place frees them, as it would without copies.
    """
    for module, _, name in lent:
        vars(module).pop(name, None)
    try:
        yield
    finally:
        for module, replica, name in lent:
            if name in vars(replica):
                vars(module)[name] = vars(replica)[name]


class HookMarks:
    """What code notes on a module of the hooks that it put there: copies share the hooks.

    Models of transformers install theirs in their first call that wants them, and note it in an
    attribute; where only a copy had that, the next would install them once more.

    Args:
        pairs: Modules, each with its copy.
    """

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = [(module, replica) for module, replica in pairs if module is not replica]
        self._tables = [
            table
            for module, _ in self._pairs
            for table in (module._forward_pre_hooks, module._forward_hooks)
        ]
        self._hooks = self._count_hooks()

    @contextmanager
    def share(self) -> Iterator[None]:
        """Around a call of the copies: what one of a pair has noted before it or in it, both have.

        Where no hooks came or went, nothing is looked at.
        """
        self._update()
        try:
            yield
        finally:
            self._update()

    def _update(self) -> None:
        hooks = self._count_hooks()
        if hooks == self._hooks:
            return
        self._hooks = hooks
        for pair in self._pairs:
            for one, other in (pair, pair[::-1]):
                for name in vars(one).keys() - vars(other).keys():
                    if isinstance(vars(one)[name], bool):
                        vars(other)[name] = vars(one)[name]

    def _count_hooks(self) -> int:
        return sum(map(len, self._tables))


def return_attributes(pairs: Pairs, held: Sequence[Mapping[str, Any]]) -> None:
    """Gives modules what became of their copies' attributes, their mode and children among them.

    Args:
        pairs: All modules of a model, itself first.
        held: What each copy holds, without what makes it another than the module.

    Raises:
        UsageError: An object that cannot be copied refers to a copy.
    """
    modules = {id(replica): module for module, replica in pairs}
    rewirer = _Rewirer(pairs[0][1], modules)
    for (module, replica), attributes in zip(pairs, held, strict=True):
        if module is replica:
            continue
        module.__class__ = type(replica)  # another where a weight got a parametrization
        own = vars(module)
        for name in own.keys() - attributes.keys():
            del own[name]
        for name, value in attributes.items():
            if name == "_modules":
                children = {k: modules.get(id(v), v) for k, v in value.items()}
                own[name].clear()
                own[name].update(children)
            elif name in _SHARED:
                own[name] = value
            else:
                own[name] = rewirer.rewire(value, name)


def _make_replica(module: nn.Module) -> nn.Module:
    if isinstance(module, torch.jit.ScriptModule):
        return module
    return object.__new__(type(module))  # no __init__, and the class as it is


class _Rewirer:
    """Puts copies of modules in the place of modules, in what refers to them."""

    def __init__(self, root: nn.Module, replicas: Replicas) -> None:
        self._root = root
        self._replicas = replicas
        self._leads_nowhere: dict[int, object] = {}

    def rewire(self, value: Any, place: str) -> Any:
        """A value that refers to copies; itself where it refers to no module of the model."""
        if isinstance(value, nn.Module) and id(value) in self._replicas:
            return self._replicas[id(value)]
        reached = self._find_modules(value)
        if not reached:
            return value
        rebuilt = self._rebuild(value, place)
        if rebuilt is not None:
            return rebuilt
        # A reference to the whole model, as a trainer has, is not what forward calls.
        held = next((module for module in reached if module is not self._root), None)
        if held is None:
            return value
        name = next(name for name, module in self._root.named_modules() if module is held)
        raise UsageError(
            f"{place} ({type(value).__name__}) holds the module {name}, and would go on calling it"
            " without the plan",
            hint="make it a submodule, or hold it in a list or dict",
        )

    def _rebuild(self, value: Any, place: str) -> Any:
        """A container or a bound function with copies in it; None for anything else."""

        def rewire(inner: Any) -> Any:
            return self.rewire(inner, place)

        kind = type(value)
        if kind in (list, tuple, set, frozenset, deque):
            return kind(map(rewire, value))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return kind(*map(rewire, value))
        if kind in (dict, OrderedDict):
            return kind((key, rewire(held)) for key, held in value.items())
        if kind is MethodType:
            return MethodType(value.__func__, rewire(value.__self__))
        if kind is functools.partial:
            named = {key: rewire(held) for key, held in value.keywords.items()}
            return functools.partial(rewire(value.func), *map(rewire, value.args), **named)
        if kind is weakref.ref and id(value()) in self._replicas:
            return weakref.ref(self._replicas[id(value())])
        return None

    def _find_modules(self, value: Any) -> list[nn.Module]:
        """The modules of the model that a value leads to, and nothing behind those."""
        seen: dict[int, object] = {}
        found: list[nn.Module] = []
        waiting = [value]
        while waiting:
            current = waiting.pop()
            known = id(current) in seen or id(current) in self._leads_nowhere
            if known or isinstance(current, LEAVES):
                continue
            seen[id(current)] = current
            if id(current) in self._replicas:
                found.append(current)
                continue
            waiting.extend(find_held(current))
        if not found:
            self._leads_nowhere.update(seen)
        return found
