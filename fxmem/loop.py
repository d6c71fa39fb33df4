"""The training loop around a model: when gradients are freed, and who holds what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from fxmem.errors import UsageError
from fxmem.specs import parse_call

_CHOICES = {
    "outputs": ("loss", "step", "next step"),
    "zero_grad": ("before forward", "before backward"),
}


@dataclass(frozen=True, slots=True)
class Loop:
    """The training loop that a step is one iteration of; the defaults are the plain one.

    Attributes:
        name: The preset that it began as: one of :data:`LOOPS`.
        accumulate: How many micro-batches, of the inputs given, add up their gradients before
            the optimizer steps.
        outputs: How long the caller holds the model's output: to the ``"loss"``; to the end of
            the ``"step"`` or until the next micro-batch's takes its name, with the loss; or
            likewise until that of the ``"next step"``.
        zero_grad: When it runs: ``"before forward"``, or ``"before backward"`` and after forward.
            After the optimizer's step is the same as before forward.
        set_to_none: Whether it frees gradients; else they are zeroed in place.
        clip_grad: Whether ``torch.nn.utils.clip_grad_norm_`` runs before the optimizer.
        retain_graph: Whether backward keeps the graph, which then lives as long as the loss and
            the output.
        detach_loss: Whether the loss is detached after backward, so that its graph goes; what is
            left is kept until that of the next micro-batch takes its place.
        keep_log: Whether scalars for a log are on the device: the sum of the losses, the norm of
            the gradients, and the loss divided by the number of micro-batches, in backward.
        autocast_loss: Whether autocast covers the loss; else the model alone, whose floating
            outputs are then cast to float32, as accelerate does.
        float_outputs: Whether floating outputs are cast to float32 without autocast, too.
        autocast_cache: Whether autocast keeps the casts of weights for other uses, until it exits.
        reduce_each: Whether the ranks of a mesh reduce gradients after each micro-batch; else after
            the last alone (``no_sync``, ``set_requires_gradient_sync``).
        side_stream: Whether the loop wraps a model in DistributedDataParallel under a stream of its
            own, which alone can use the memory of the first buckets again.
        prefetch: Whether the inputs of all micro-batches of a step are on the device when it
            begins; else each are moved there when they are needed.

    Raises:
        UsageError: A value that is none of these.

    >>> Loop(accumulate=4, outputs="loss").describe()
    "plain(accumulate=4, outputs='loss')"
    """

    name: str = "plain"
    accumulate: int = 1
    outputs: str = "step"
    zero_grad: str = "before forward"
    set_to_none: bool = True
    clip_grad: bool = False
    retain_graph: bool = False
    detach_loss: bool = False
    keep_log: bool = False
    autocast_loss: bool = True
    float_outputs: bool = False
    autocast_cache: bool = True
    reduce_each: bool = True
    side_stream: bool = False
    prefetch: bool = False

    def __post_init__(self) -> None:
        for name, values in _CHOICES.items():
            if getattr(self, name) not in values:
                raise UsageError(
                    f"{name}={getattr(self, name)!r} is not supported by a loop",
                    hint=" or ".join(map(repr, values)),
                )
        is_number = isinstance(self.accumulate, int) and not isinstance(self.accumulate, bool)
        if not is_number or self.accumulate < 1:
            raise UsageError(
                f"{self.accumulate!r} micro-batches are not a step", hint="an integer, 1 or more"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                raise UsageError(f"{field.name} of a loop must be True or False, got {value!r}")

    def describe(self) -> str:
        """The preset, and in parentheses the settings that differ from it."""
        preset = LOOPS.get(self.name, PLAIN)
        settings = ", ".join(
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if field.name != "name" and getattr(self, field.name) != getattr(preset, field.name)
        )
        return f"{self.name}({settings})" if settings else self.name


PLAIN = Loop()
LOOPS: Mapping[str, Loop] = {
    "plain": PLAIN,
    # transformers 5.23, trainer.py, training_step and _run_epoch; accelerate 1.15,
    # accelerator.py, prepare_model, clip_grad_norm_ and no_sync
    "huggingface": Loop(
        "huggingface",
        outputs="loss",
        clip_grad=True,
        detach_loss=True,
        keep_log=True,
        autocast_loss=False,
        reduce_each=False,
        prefetch=True,
    ),
    # lightning 2.6, pytorch/loops/optimization/automatic.py, Closure.closure;
    # pytorch/plugins/precision/amp.py, MixedPrecision.autocast_context_manager;
    # pytorch/strategies/ddp.py, DDPStrategy._setup_model
    "lightning": Loop(
        "lightning",
        outputs="loss",
        zero_grad="before backward",
        autocast_cache=False,
        side_stream=True,
    ),
    # lightning 2.6, fabric/wrappers.py, _FabricModule.forward; fabric/plugins/precision/half.py,
    # HalfPrecision.convert_output; fabric/strategies/ddp.py, DDPStrategy.setup_module
    "fabric": Loop("fabric", autocast_loss=False, float_outputs=True, side_stream=True),
}
"""The loops that have a name."""


def resolve_loop(loop: str | Loop, settings: Mapping[str, Any]) -> Loop:
    """Resolves a loop, or the name of one (``"huggingface(accumulate=4)"``), with other settings.

    Raises:
        UsageError: There is no such loop, or no such field.

    >>> resolve_loop("lightning", {"accumulate": 2}).describe()
    'lightning(accumulate=2)'
    """
    if isinstance(loop, Loop):
        return replace(loop, **settings)
    if not isinstance(loop, str):
        raise UsageError(
            f"loop must be a name or an fxmem.Loop, got {type(loop).__name__}",
            hint=f"{', '.join(LOOPS)}, or fxmem.Loop(...)",
        )
    name, own = parse_call(loop, "loop", "plain(accumulate=4, outputs='loss')")
    if name not in LOOPS:
        raise UsageError(f"unknown loop {name!r}", hint=f"one of {', '.join(LOOPS)}")
    known = [field.name for field in fields(Loop) if field.name != "name"]
    unknown = next((key for key in own if key not in known), None)
    if unknown is not None:
        raise UsageError(f"a loop has no setting {unknown!r}", hint=f"one of {', '.join(known)}")
    return replace(LOOPS[name], **{**own, **settings})
