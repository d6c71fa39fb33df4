"""Training loops around a model: who holds what, and when gradients are freed.

Each is written like the trainer's own, and drives a :class:`fxmem.training.training.Training`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fxmem.errors import UsageError
from fxmem.loading.parsing import is_target
from fxmem.loading.target import load_function
from fxmem.setup import Loop
from fxmem.specs import parse_call
from fxmem.training.training import Training

LoopFunction: TypeAlias = Callable[..., None]
LoopChoice: TypeAlias = str | Loop | LoopFunction
"""A name with settings or without, a TARGET of a function, a function of the training."""


def plain(
    training: Training,
    *,
    accumulate: int = 1,
    outputs: str = "step",
    zero_grad: str = "before forward",
    set_to_none: bool = True,
    clip_grad: bool = False,
    retain_graph: bool = False,
    reduce_each: bool = True,
) -> None:
    """Trains as PyTorch's tutorials do.

    Args:
        training: The training.
        accumulate: Micro-batches of a step, of the inputs given.
        outputs: How long the model's output is held: to the ``"loss"``; to the end of the
            ``"step"``, with the loss, or until the next micro-batch's takes its name; or until
            that of the ``"next step"`` does.
        zero_grad: When it runs: ``"before forward"``, or ``"before backward"``. After the
            optimizer's step is the same as before forward.
        set_to_none: Whether it frees gradients; else they are zeroed in place.
        clip_grad: Whether ``torch.nn.utils.clip_grad_norm_`` runs before the optimizer.
        retain_graph: Whether backward keeps the graph.
        reduce_each: Whether ranks reduce gradients after each micro-batch, or the last alone.
    """
    model, optimizer, scaler = training.model, training.optimizer, training.scaler
    for batch in training.batches(accumulate):
        if batch.is_first and outputs != "next step":
            output = loss = None
        if batch.is_first and zero_grad == "before forward":
            optimizer.zero_grad(set_to_none)
        with training.no_sync(batch, reduce_each=reduce_each):
            with training.autocast():
                output = model(*batch.args, **batch.kwargs)
                loss = training.loss(output)
            if outputs == "loss":
                del output
            if batch.is_first and zero_grad == "before backward":
                optimizer.zero_grad(set_to_none)
            scaler.scale(loss).backward(retain_graph=retain_graph)
        if batch.is_last:
            if clip_grad:
                scaler.unscale_(optimizer)
                training.hold("norm of gradients", clip_gradients(model))
            scaler.step(optimizer)
            scaler.update()


def huggingface(
    training: Training,
    *,
    accumulate: int = 1,
    outputs: str = "loss",
    set_to_none: bool = True,
    clip_grad: bool = True,
) -> None:
    """Trains as ``transformers.Trainer``; settings as those of :func:`plain`.

    The inputs of all micro-batches are on the device when the step begins. Scalars for the log
    are there too. Source: transformers 5.23, trainer.py, ``training_step`` and ``_run_epoch``;
    accelerate 1.15, accelerator.py, ``prepare_model``, ``clip_grad_norm_`` and ``no_sync``.
    """
    model, optimizer, scaler = training.model, training.optimizer, training.scaler
    others, norm = training.make_inputs(accumulate - 1), None
    sum_of_losses = training.hold("sum of losses", training.make_scalar())
    for batch in training.batches(accumulate):
        if batch.is_first and outputs != "next step":
            output = None
        if batch.is_first:
            optimizer.zero_grad(set_to_none)
        with training.no_sync(batch):
            with training.autocast():
                output = model(*batch.args, **batch.kwargs)
            if training.is_autocast:
                output = training.hold("output", cast_to_float32(output))
            loss = training.loss(output)
            if outputs == "loss":
                del output
            divided = loss / accumulate
            scaled = scaler.scale(divided)
            scaled.backward()
            last_loss = loss.detach()
            del loss, divided, scaled
        if batch.is_last:
            if clip_grad:
                scaler.unscale_(optimizer)
                norm = training.hold("norm of gradients", clip_gradients(model))
            scaler.step(optimizer)
            scaler.update()
    del others, sum_of_losses, last_loss, norm


def lightning(
    training: Training,
    *,
    accumulate: int = 1,
    outputs: str = "loss",
    set_to_none: bool = True,
    clip_grad: bool = False,
) -> None:
    """Trains as ``lightning.Trainer``; settings as those of :func:`plain`.

    Source: lightning 2.6, pytorch/loops/optimization/automatic.py, ``Closure.closure``;
    pytorch/plugins/precision/amp.py, ``MixedPrecision.autocast_context_manager``.
    """
    model, optimizer, scaler = training.model, training.optimizer, training.scaler
    for batch in training.batches(accumulate):
        if batch.is_first and outputs != "next step":
            output = loss = None
        with training.autocast(cache_enabled=False):
            output = model(*batch.args, **batch.kwargs)
            loss = training.loss(output)
        if outputs == "loss":
            del output
        if batch.is_first:
            optimizer.zero_grad(set_to_none)
        scaler.scale(loss).backward()
        if batch.is_last:
            if clip_grad:
                scaler.unscale_(optimizer)
                training.hold("norm of gradients", clip_gradients(model))
            scaler.step(optimizer)
            scaler.update()


def fabric(
    training: Training,
    *,
    accumulate: int = 1,
    outputs: str = "step",
    set_to_none: bool = True,
    clip_grad: bool = False,
) -> None:
    """Trains as a plain loop with ``lightning.Fabric``; settings as those of :func:`plain`.

    Autocast covers the model alone, whose output is cast to float32. Source: lightning 2.6,
    fabric/wrappers.py, ``_FabricModule.forward``; fabric/plugins/precision/half.py,
    ``HalfPrecision.convert_output``.
    """
    model, optimizer, scaler = training.model, training.optimizer, training.scaler
    for batch in training.batches(accumulate):
        if batch.is_first and outputs != "next step":
            output = loss = None
        if batch.is_first:
            optimizer.zero_grad(set_to_none)
        with training.autocast():
            output = model(*batch.args, **batch.kwargs)
        output = training.hold("output", cast_to_float32(output))
        loss = training.loss(output)
        if outputs == "loss":
            del output
        scaler.scale(loss).backward()
        if batch.is_last:
            if clip_grad:
                scaler.unscale_(optimizer)
                training.hold("norm of gradients", clip_gradients(model))
            scaler.step(optimizer)
            scaler.update()


def infer(training: Training, *, outputs: str = "step") -> None:
    """Runs the model without gradients."""
    for batch in training.batches():
        if outputs != "next step":
            output = None
        with training.without_grad(), training.autocast():
            output = training.model(*batch.args, **batch.kwargs)
    del output


LOOPS: Mapping[str, LoopFunction] = {
    function.__name__: function for function in (plain, huggingface, lightning, fabric)
}
"""The loops that have a name."""
SIDE_STREAMS = ("lightning", "fabric")
"""Loops that build ``DistributedDataParallel`` under a stream of its own: lightning 2.6,
pytorch/strategies/ddp.py, ``DDPStrategy._setup_model``; fabric/strategies/ddp.py."""
_CHOICES = {
    "outputs": ("loss", "step", "next step"),
    "zero_grad": ("before forward", "before backward"),
}


def resolve_loop(loop: LoopChoice, settings: Mapping[str, Any]) -> tuple[Loop, LoopFunction]:
    """Resolves a loop, or the name or TARGET of one, with other settings but the ones of None.

    Returns:
        The loop as reports name it, and its function with the settings.

    Raises:
        UsageError: There is no such loop, or no such setting.

    >>> str(resolve_loop("lightning", {"accumulate": 2})[0])
    'lightning(accumulate=2)'
    """
    settings = {name: value for name, value in settings.items() if value is not None}
    if callable(loop):
        return _bind(str(getattr(loop, "__name__", type(loop).__name__)), loop, settings)
    if isinstance(loop, Loop):
        return resolve_loop(loop.name, {**loop.settings, **settings})
    if not isinstance(loop, str):
        raise UsageError(
            f"loop must be a name or a function, got {type(loop).__name__}",
            hint=f"{', '.join(LOOPS)}, or a function of the training",
        )
    if is_target(loop):
        made = Loop(loop, settings)
        return made, lambda training: load_loop(made)(training)
    name, own = parse_call(loop, "loop", "plain(accumulate=4, outputs='loss')")
    if name not in LOOPS:
        known = f"one of {', '.join(LOOPS)}; or a function, file.py:function"
        raise UsageError(f"unknown loop {name!r}", hint=known)
    return _bind(name, LOOPS[name], {**own, **settings})


def load_loop(loop: Loop) -> LoopFunction:
    """Loads the function of a loop that is given as a TARGET."""
    return _bind(loop.name, load_function(loop.name), loop.settings)[1]


def _bind(
    name: str, function: LoopFunction, settings: Mapping[str, Any]
) -> tuple[Loop, LoopFunction]:
    parameters = [*inspect.signature(function).parameters.values()][1:]
    defaults = {each.name: each.default for each in parameters}
    for key, value in settings.items():
        if key not in defaults:
            known = ", ".join(defaults) or "it takes the training alone"
            raise UsageError(f"the loop {name} has no setting {key!r}", hint=f"one of {known}")
        if isinstance(defaults[key], bool) and not isinstance(value, bool):
            raise UsageError(f"{key} of a loop must be True or False, got {value!r}")
        if value not in _CHOICES.get(key, (value,)):
            raise UsageError(
                f"{key}={value!r} is not supported by a loop",
                hint=" or ".join(map(repr, _CHOICES[key])),
            )
    accumulate = settings.get("accumulate", 1)
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        hint = "an integer, 1 or more"
        raise UsageError(f"{accumulate!r} micro-batches are not a step", hint=hint)
    differing = {
        key: settings[key] for key in defaults if settings.get(key, defaults[key]) != defaults[key]
    }
    return Loop(name, differing), functools.partial(function, **differing)


def clip_gradients(model: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def cast_to_float32(output: Any) -> Any:
    """Casts the tensors of half precision in a model's output to float32.

    Source: ``convert_to_fp32`` in accelerate's ``utils/operations.py``, which walks lists,
    tuples and mappings; ``convert_output`` in Lightning's ``fabric/plugins/precision``.

    >>> cast_to_float32({"x": (torch.zeros(2, dtype=torch.bfloat16), 3)})
    {'x': (tensor([0., 0.]), 3)}
    """
    if isinstance(output, Mapping):
        made = {name: cast_to_float32(value) for name, value in output.items()}
        return type(output)(made)  # type: ignore[call-arg]
    if isinstance(output, tuple | list):
        parts = (cast_to_float32(value) for value in output)
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    is_half = isinstance(output, Tensor) and output.dtype in (torch.float16, torch.bfloat16)
    return output.float() if is_half else output
