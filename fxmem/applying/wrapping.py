"""Plans of whole modules: a model whose own code runs, some of its modules under checkpoints.

The model's modules are copied as objects, with the same parameters, buffers and hooks, of the same
classes and under the same names; a copy that is to be computed again has a ``forward`` of its own,
in front of its class's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fxmem.applying.forwards import CheckpointedForward, PlannedForward, list_own, set_forward
from fxmem.applying.holders import find_holders
from fxmem.applying.replicas import copy_modules, return_attributes
from fxmem.applying.surroundings import is_normalised
from fxmem.errors import UsageError
from fxmem.planning.plan import Plan, Segment


def find_original(model: nn.Module) -> nn.Module | None:
    """The model that a plan of modules was applied to; None where none was.

    Args:
        model: From :func:`wrap_modules`, or any other.
    """
    forward = vars(model).get("forward")
    return forward.original if isinstance(forward, PlannedForward) else None


def unwrap_modules(planned: nn.Module) -> nn.Module:
    """The model that a plan of modules was applied to, as the planned one is now.

    What training put into attributes of modules - a counter, a mode, another layer - goes along.

    Args:
        planned: From :func:`wrap_modules`.

    Raises:
        UsageError: An object that the model made holds a module of the planned one.
    """
    forward = vars(planned)["forward"]
    assert isinstance(forward, PlannedForward)
    return_attributes(forward.pairs, [_list_attributes(*pair) for pair in forward.pairs])
    return forward.original


def _list_attributes(module: nn.Module, replica: nn.Module) -> dict[str, Any]:
    """What a copy holds beside what wrapping gave it."""
    held = list_own(replica)
    if isinstance(held.get("plan"), Plan) and "plan" not in vars(module):
        del held["plan"]
    return held


def wrap_modules(model: nn.Module, segments: Iterable[Segment]) -> nn.Module:
    """A model that computes some of its modules again, and shares everything with the original.

    Args:
        model: The original, which is left as it is.
        segments: Calls of the modules.

    Raises:
        UsageError: A module is not in the model, is none whose ``forward`` can be replaced, or is
            held by an object that would go on calling the original; or the model has a plan.
    """
    if find_original(model) is not None:
        raise UsageError("a plan was applied to this model", hint="fxmem.unapply it first")
    choices = _gather(segments)
    modules = dict(model.named_modules(remove_duplicate=False))
    for fqn in choices:
        if not fqn or fqn not in modules:
            raise UsageError(
                f"the plan's module {fqn!r} is not in the model",
                hint="make the plan for this model",
            )
        if isinstance(modules[fqn], torch.jit.ScriptModule):
            raise UsageError(f"{fqn} is a script, which runs as it was compiled")
    replicas = copy_modules(model)
    is_miscompiled = is_normalised(model.modules())
    for fqn, (random, norms, states) in choices.items():
        module = replicas[id(modules[fqn])]
        inside = tuple(replicas[id(modules[name])] for name in norms if name in modules)
        held = tuple(
            (replicas[id(modules[owner])], name) for owner, name in find_holders(model, states)
        )
        forward = CheckpointedForward(module, fqn, random, inside, held, is_miscompiled)
        set_forward(module, forward)
    root = replicas[id(model)]
    pairs = tuple((module, replicas[id(module)]) for module in model.modules())
    set_forward(root, PlannedForward(root, model, pairs))
    return root


def _gather(
    segments: Iterable[Segment],
) -> dict[str, tuple[bool, tuple[str, ...], tuple[str, ...]]]:
    """By module, whether any of its calls draws random numbers, their normalisations and states."""
    found: dict[str, tuple[bool, tuple[str, ...], tuple[str, ...]]] = {}
    for segment in _iterate_segments(segments):
        random, norms, states = found.get(segment.fqn, (False, (), ()))
        found[segment.fqn] = (
            random or segment.random,
            tuple(dict.fromkeys((*norms, *segment.norms))),
            tuple(dict.fromkeys((*states, *segment.states))),
        )
    return found


def _iterate_segments(segments: Iterable[Segment]) -> Iterator[Segment]:
    for segment in segments:
        yield segment
        yield from _iterate_segments(segment.children)
