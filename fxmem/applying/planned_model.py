"""Planned models, whose forward runs by a plan, and the plans that recompute whole modules of them.

A planned model is an object beside the user's, of a subclass of its class, and has the very same
attributes: parameters, buffers, submodules, hooks and mode are one. With a plan of modules, a
``forward`` that checkpoints stands in front of the ``forward`` of each chosen module meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from fxmem.applying.runtime import checkpoint
from fxmem.errors import UsageError
from fxmem.planning.model.recomputation import iterate_segments
from fxmem.planning.plan import Plan, Segment


class PlannedForward(Protocol):
    """The forward of a model by a plan."""

    plan: Plan
    calls: int  # the number of calls that ran by it

    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs by the plan, or as the model's own forward does where the plan is not for that."""


class _Planned:
    _fxmem_original: nn.Module
    _fxmem_forward: PlannedForward
    _fxmem_hiding: Any  # a ``forward`` that hid the class's when the plan was applied

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator,no-untyped-call]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = super()
        own: Any = vars(self).get("forward")
        if own is None or own is not self._fxmem_hiding:
            return model.__call__(*args, **kwargs)
        run = functools.partial(self._fxmem_forward.run, own)
        vars(self)["forward"] = functools.update_wrapper(run, own)
        try:
            return model.__call__(*args, **kwargs)
        finally:
            vars(self)["forward"] = own

    def __reduce_ex__(self, protocol: Any) -> Any:
        return make_planned, (self._fxmem_original, self._fxmem_forward)


def make_planned(original: nn.Module, forward: PlannedForward) -> nn.Module:
    """Makes a planned model."""
    base = type(original)
    hiding: Any = vars(original).get("forward")

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator,no-untyped-call]
    @functools.wraps(base.forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward.run(base.forward.__get__(self), *args, **kwargs)

    attributes = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    attributes |= {
        "_fxmem_original": original,
        "_fxmem_forward": forward,
        "_fxmem_hiding": staticmethod(hiding),
        "forward": run,
    }
    added = {"plan": forward.plan, "plan_calls": property(lambda self: forward.calls)}
    attributes |= {name: value for name, value in added.items() if not hasattr(original, name)}
    kind: Any = type(base.__name__, (_Planned, base), attributes)
    planned: nn.Module = object.__new__(kind)
    object.__setattr__(planned, "__dict__", vars(original))
    return planned


def find_original(model: nn.Module) -> nn.Module | None:
    """Finds the model that a plan was applied to; None where none was."""
    return model._fxmem_original if isinstance(model, _Planned) else None


def run_by_plan(planned: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls the forward of a model as its planned model does; a model may have no plan."""
    if not isinstance(planned, _Planned):
        return forward(*args, **kwargs)
    return planned._fxmem_forward.run(forward, *args, **kwargs)


@dataclass(slots=True)
class _Choice:
    """A module that is recomputed, with the facts of all its calls."""

    norms: tuple[str, ...] = ()  # names of its batch normalisations
    # other tensors that it changes: names of modules and of their tensors
    states: tuple[tuple[str, str], ...] = ()
    inner: list[str] = field(default_factory=list)  # names of the chosen modules within it
    whole: bool = True  # whether nothing comes after the last save of each call


_Choices = Mapping[str, _Choice]


class _ModulesForward:
    """The forward of a model, with some of its modules recomputed in training."""

    def __init__(self, model: nn.Module, choices: _Choices, plan: Plan) -> None:
        self._model, self._choices, self.plan, self.calls = model, choices, plan, 0

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator,no-untyped-call]
    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's own forward."""
        if not (self._model.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        self.calls += 1
        with _checkpoint_modules(self._model, self._choices, self._choices):
            return forward(*args, **kwargs)


def wrap_modules(model: nn.Module, plan: Plan) -> nn.Module:
    """Makes a model that recomputes the modules of a plan, and shares all with the original."""
    choices = _gather_choices(model, plan.segments)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in choices:
        if not name or name not in modules:
            raise UsageError(
                f"the plan's module {name!r} is not in the model",
                hint="make the plan for this model",
            )
    for name in ("", *choices):
        if isinstance(modules[name], torch.jit.ScriptModule):
            raise UsageError(f"{name or 'the model'} is a script, which runs as it was compiled")
    return make_planned(model, _ModulesForward(model, choices, plan))


def find_holders(model: nn.Module, names: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Finds the modules that hold some tensors, and the names of the tensors in them.

    >>> find_holders(nn.Sequential(nn.BatchNorm1d(2)), ["0.running_mean"])
    (('0', 'running_mean'),)
    """
    holders = []
    for path in names:
        owner, _, name = path.rpartition(".")
        try:
            tensor = getattr(model.get_submodule(owner), name)
        except AttributeError:
            tensor = None
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(
                f"the plan's tensor {path!r} is not in the model",
                hint="make the plan for this model",
            )
        holders.append((owner, name))
    return tuple(holders)


def _gather_choices(model: nn.Module, segments: Iterable[Segment]) -> dict[str, _Choice]:
    choices: dict[str, _Choice] = {}
    for segment in iterate_segments(segments):
        choice = choices.setdefault(segment.fqn, _Choice())
        choice.norms = (*dict.fromkeys((*choice.norms, *segment.norms)),)
        states = find_holders(model, segment.states)
        choice.states = (*dict.fromkeys((*choice.states, *states)),)
        choice.whole = choice.whole and segment.runs_whole
        inner = (child.fqn for child in iterate_segments(segment.children))
        choice.inner = [*dict.fromkeys((*choice.inner, *inner))]
    return choices


@contextlib.contextmanager
def _checkpoint_modules(model: Any, choices: _Choices, names: Iterable[str]) -> Iterator[None]:
    """Makes modules of a model checkpoint themselves for a while, in all of their calls."""
    replaced: list[tuple[dict[str, Any], Any]] = []
    try:
        for name, module in _iterate_modules(model, names):
            own = vars(module).get("forward")
            if not isinstance(own, _CheckpointedForward):
                forward = _CheckpointedForward(model, module, name, choices)
                replaced.append((vars(module), own))
                vars(module)["forward"] = forward
        yield
    finally:
        for attributes, own in replaced:
            attributes.pop("forward", None)
            if own is not None:
                attributes["forward"] = own


def _iterate_modules(model: Any, names: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
    for name in names:
        with contextlib.suppress(AttributeError):  # it is there no more
            yield name, model.get_submodule(name)


class _CheckpointedForward:
    """The ``forward`` of a module, as one segment."""

    def __init__(self, model: Any, module: nn.Module, name: str, choices: _Choices) -> None:
        self._model, self._module, self._name, self._choices = model, module, name, choices
        self._own: Callable[..., Any] = module.forward

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._module.training and torch.is_grad_enabled()):
            return self._own(*args, **kwargs)
        choice = self._choices[self._name]
        count, names = len(args), tuple(kwargs)
        values = (*args, *kwargs.values())
        first = [values]  # what whoever made a list adds to it later is not for the second run

        def run(*copies: Any) -> Any:
            given = first.pop() if first else copies
            named = dict(zip(names, given[count:], strict=True))
            if not choice.inner:
                return self._own(*given[:count], **named)
            with _checkpoint_modules(self._model, self._choices, choice.inner):
                return self._own(*given[:count], **named)

        owners = dict(_iterate_modules(self._model, [owner for owner, _ in choice.states]))
        return checkpoint(
            run,
            *map(_copy_containers, values),
            norms=[norm for _, norm in _iterate_modules(self._model, choice.norms)],
            states=[(owners[o], key) for o, key in choice.states if hasattr(owners.get(o), key)],
            name=self._name,
            whole=choice.whole,
        )


def _copy_containers(value: Any) -> Any:
    kind = type(value)
    if kind in (list, tuple, set):
        return kind(map(_copy_containers, value))
    if kind is dict:
        return {key: _copy_containers(held) for key, held in value.items()}
    return value
