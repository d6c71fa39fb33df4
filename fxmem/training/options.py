"""Options of an analysis: checked, and resolved to targets, GPUs, loops and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fxmem.errors import UsageError
from fxmem.gpus import GpuModel, find_gpu
from fxmem.kernels.cpu import CPU
from fxmem.kernels.cuda import CUDA
from fxmem.kernels.cuda.attention.backends import BACKENDS, note_preference
from fxmem.kernels.cuda.gpu import Gpu, describe_gpu
from fxmem.kernels.registry import Backend
from fxmem.loading.parsing import is_target
from fxmem.loading.target import load_function
from fxmem.loop import Loop
from fxmem.parallelism.layout import NO_KNOBS, Knobs, Layout, ParallelizeChoice, resolve_layout
from fxmem.plugins import load_plugins
from fxmem.recording.size_hints import SizeHint, SizeHints, read_size_hint
from fxmem.specs import parse_dtype, strip_torch
from fxmem.training.loops import SIDE_STREAMS, LoopChoice, LoopFunction, resolve_loop
from fxmem.training.losses import resolve_loss
from fxmem.training.optimizers import resolve_optimizer

MODES = ("train", "infer")
FRONTENDS = ("fx", "record")
TARGETS = {target.name: target for target in (CUDA, CPU)}
LossChoice = str | Callable[[Any], torch.Tensor] | None
"""A name, a TARGET, a function from the output to a scalar; None for the default."""
OptimizerChoice = str | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None
"""A name, a TARGET, a callable from the parameters to the optimizer; None for none."""


@dataclass(frozen=True, slots=True)
class Options:
    """Checked options, which hold for any model."""

    mode: str  # train or infer
    inference_mode: bool  # whether inference runs under inference_mode, else under no_grad
    target: Backend  # the device whose kernels run the step
    gpu: GpuModel | None  # the target GPU; None for any
    architecture: Gpu  # the properties of the GPU that the choice of kernels depends on
    dtype: str | None  # of parameters and floating inputs; None for their own
    autocast: str | None  # the dtype of forward and loss under autocast, as the caller wrote it
    autocast_to: torch.dtype | None  # the same, as PyTorch takes it
    loop: Loop  # around the model
    run_loop: LoopFunction  # the same, to be called with the training
    frontend: str | None  # asked for
    size_hint: SizeHint  # how many elements nonzero and the like find; None to refuse them
    hints: SizeHints  # the same, read
    layout: Layout | None = None  # on a mesh of processes; None for one process

    @property
    def has_side_stream(self) -> bool:
        """Whether the loop builds ``DistributedDataParallel`` under a stream of its own."""
        return self.loop.name in SIDE_STREAMS

    def list_notes(self, operators: Iterable[str]) -> Iterator[str]:
        """Lists what is not counted or was assumed of a step's operators, a sentence each."""
        names = [*operators]
        yield from self.target.list_uncounted(names)
        yield from note_preference(names, self.architecture)


def resolve_options(
    *,
    mode: str = "train",
    inference_mode: bool = False,
    device: str | torch.device = "cuda",
    gpu: str | None = None,
    attention: str | None = None,
    dtype: str | torch.dtype | None = None,
    autocast: str | torch.dtype | None = None,
    loop: LoopChoice = "plain",
    accumulate: int | None = None,
    set_to_none: bool | None = None,
    hold_outputs: bool | None = None,
    frontend: str | None = None,
    size_hint: SizeHint = None,
    mesh: Mapping[str, int] | None = None,
    parallelize: ParallelizeChoice = None,
    rank: int | str = 0,
    knobs: Knobs = NO_KNOBS,
) -> Options:
    """Checks arguments of :func:`fxmem.analyze`, and finds the objects that they name.

    Raises:
        UsageError: An argument is not understood, or contradicts another.
    """
    load_plugins()
    device = str(device)  # a torch.device has its name
    check_mode(mode)
    if inference_mode and mode != "infer":
        raise UsageError(f"inference_mode with mode={mode!r}", hint="mode='infer' (--mode infer)")
    if device not in TARGETS:
        raise UsageError(f"unknown device {device!r}", hint=" or ".join(TARGETS))
    if frontend not in (None, *FRONTENDS):
        raise UsageError(f"unknown frontend {frontend!r}", hint="fx or record")
    if gpu is not None and device != "cuda":
        raise UsageError(f"gpu={gpu!r} with device={device!r}", hint="leave one of them out")
    if attention not in (None, *BACKENDS):
        raise UsageError(f"unknown attention {attention!r}", hint=" or ".join(BACKENDS))
    if attention is not None and device != "cuda":
        raise UsageError(f"attention={attention!r} with device={device!r}", hint="device='cuda'")
    layout = resolve_layout(mesh, parallelize, rank, knobs)
    if layout is not None and frontend == "fx":
        raise UsageError("the fx frontend with a mesh", hint="leave the frontend out")
    model = None if gpu is None else find_gpu(gpu)
    outputs = None if hold_outputs is None else "next step" if hold_outputs else "step"
    settings = {"accumulate": accumulate, "set_to_none": set_to_none, "outputs": outputs}
    given = {name: value for name, value in settings.items() if value is not None}
    named_loop, run_loop = resolve_loop(loop, given)
    return Options(
        mode=mode,
        inference_mode=inference_mode,
        target=TARGETS[device],
        gpu=model,
        architecture=replace(describe_gpu(model), attention=attention),
        dtype=None if dtype is None else parse_dtype(dtype),
        autocast=None if autocast is None else strip_torch(autocast),
        autocast_to=_resolve_autocast(autocast, device),
        loop=named_loop,
        run_loop=run_loop,
        frontend=frontend if layout is None else "record",
        size_hint=size_hint,
        layout=layout,
        hints=read_size_hint(size_hint),
    )


def _resolve_autocast(autocast: str | torch.dtype | None, device: str) -> torch.dtype | None:
    if autocast is None:
        return None
    if not isinstance(autocast, str | torch.dtype):
        raise UsageError(f"autocast={autocast!r} is not a dtype", hint="bf16, fp16, or None")
    name = parse_dtype(strip_torch(autocast))
    if name not in ("bfloat16", "float16"):
        raise UsageError(f"autocast to {name}", hint="bf16 or fp16")
    if device == "cpu" and name == "float16":
        raise UsageError("autocast to float16 is not supported on the CPU", hint="bf16")
    return getattr(torch, name)  # type: ignore[no-any-return]


def check_mode(mode: object) -> None:
    """Raises UsageError unless a mode is ``train`` or ``infer``."""
    if mode not in MODES:
        raise UsageError(
            f"unknown mode {mode!r}",
            hint="did you mean infer?" if mode == "eval" else " or ".join(MODES),
        )


# -- losses and optimizers as a caller chooses them: named, written or imported -------------------


def check_choices(loss: LossChoice, optimizer: OptimizerChoice) -> None:
    """Refuses unknown names of losses and optimizers before anything is imported."""
    if not is_target(optimizer):
        resolve_optimizer(optimizer)
    if not is_target(loss):
        resolve_loss(loss)


def load_choice(choice: Any) -> Any:
    """Loads a loss or an optimizer that is given as a TARGET; returns anything else unchanged."""
    return load_function(choice) if is_target(choice) else choice


def name_choice(choice: Any) -> str | None:
    """Names a loss or an optimizer for a report."""
    if choice is None or isinstance(choice, str):
        return choice
    return str(getattr(choice, "__name__", type(choice).__name__))
