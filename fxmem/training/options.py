"""Options of a recording: checked, and resolved to targets, GPUs, loops and dtypes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fxmem.compiling.compiler import Compilation
from fxmem.errors import UsageError
from fxmem.gpus import GpuModel, find_gpu
from fxmem.kernels.cpu import CPU
from fxmem.kernels.cuda import CUDA
from fxmem.kernels.cuda.attention.backends import BACKENDS, note_preference
from fxmem.kernels.cuda.gpu import Gpu, describe_gpu
from fxmem.kernels.registry import Backend
from fxmem.loading.parsing import is_target
from fxmem.loading.target import load_function
from fxmem.memory.allocator.settings import AllocatorSettings, parse_settings
from fxmem.parallelism.layout import Layout
from fxmem.plugins import load_plugins
from fxmem.recording.size_hints import SizeHint, SizeHints, read_routing, read_size_hint
from fxmem.setup import PLAIN, Loop
from fxmem.specs import parse_dtype, strip_torch
from fxmem.training.loops import SIDE_STREAMS, LoopFunction, plain
from fxmem.training.losses import resolve_loss
from fxmem.training.optimizers import resolve_optimizer
from fxmem.units import format_bytes, resolve_bytes

MODES = ("train", "infer", "generate")
FRONTENDS = ("fx", "record")
"""The ways in which tokens may go to experts: evenly, or all to the same."""
TARGETS = {target.name: target for target in (CUDA, CPU)}
LossChoice = str | Callable[[Any], torch.Tensor] | None
"""A name, a TARGET, a function from the output to a scalar; None for the default."""
OptimizerChoice = str | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None
"""A name, a TARGET, a callable from the parameters to the optimizer; None for none."""
DtypeChoice = str | torch.dtype | None
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True, slots=True)
class Options:
    """Checked options, which hold for any model; by default of training by a plain loop."""

    target: Backend  # the device whose kernels run the step
    gpu: GpuModel | None  # the target GPU; None for any
    architecture: Gpu  # the properties of the GPU that the choice of kernels depends on
    settings: AllocatorSettings | None  # of the caching allocator; None where there is none
    size_hint: SizeHint  # how many elements nonzero and the like find; None to refuse them
    hints: SizeHints  # the same, read
    mode: str = "train"  # or infer
    inference_mode: bool = False  # whether inference runs under it, else under no_grad
    dtype: str | None = None  # of parameters and floating inputs; None for their own
    autocast: str | None = None  # the dtype of forward and loss, as the caller wrote it
    loop: Loop = PLAIN  # around the model
    run_loop: LoopFunction = plain  # the same, to be called with the training
    frontend: str | None = None  # asked for
    # of torch.compile; None where it is left out
    compilation: Compilation | None = field(default_factory=Compilation)
    layout: Layout | None = None  # on a mesh of processes; None for one process
    reserved_bytes: int = 0  # of the GPU, which ``gpu`` is without

    @property
    def autocast_to(self) -> torch.dtype | None:
        """The dtype of autocast as PyTorch takes it."""
        return None if self.autocast is None else getattr(torch, parse_dtype(self.autocast))

    @property
    def has_side_stream(self) -> bool:
        """True if the loop builds ``DistributedDataParallel`` under a stream of its own."""
        return self.loop.name in SIDE_STREAMS

    def list_notes(self, operators: Iterable[str]) -> Iterator[str]:
        """Lists what is not counted or was assumed of a step's operators, a sentence each."""
        names = [*operators]
        yield from self.target.list_uncounted(names)
        yield from note_preference(names, self.architecture)
        if self.reserved_bytes:
            yield f"{format_bytes(self.reserved_bytes)} of the GPU are kept for others (reserve)."


def resolve_device(
    device: str | torch.device,
    gpu: str | None,
    attention: str | None,
    alloc_conf: str | None,
    size_hint: SizeHint,
    reserve: str | int | None = None,
    routing: str | Sequence[float] = "balanced",
) -> Options:
    """Checks the options that every recording has, and finds the objects that they name.

    Raises:
        UsageError: An option is not understood, or contradicts another.
    """
    load_plugins()
    device = str(device)  # a torch.device has its name
    if device not in TARGETS:
        raise UsageError(f"unknown device {device!r}", hint=" or ".join(TARGETS))
    if gpu is not None and device != "cuda":
        raise UsageError(f"gpu={gpu!r} with device={device!r}", hint="leave one of them out")
    if attention not in (None, *BACKENDS):
        raise UsageError(f"unknown attention {attention!r}", hint=" or ".join(BACKENDS))
    if attention is not None and device != "cuda":
        raise UsageError(f"attention={attention!r} with device={device!r}", hint="device='cuda'")
    model = None if gpu is None else find_gpu(gpu)
    reserved_bytes = 0 if reserve is None else resolve_bytes(reserve)
    capacity_bytes = 0 if model is None else model.capacity_bytes - reserved_bytes
    if reserved_bytes and capacity_bytes <= 0:
        raise UsageError(f"reserve={reserve!r} with gpu={gpu!r}", hint="a part of a GPU's memory")
    return Options(
        target=TARGETS[device],
        gpu=None if model is None else replace(model, capacity_bytes=capacity_bytes),
        reserved_bytes=reserved_bytes,
        architecture=replace(describe_gpu(model), attention=attention),
        settings=_find_settings(device, alloc_conf),
        size_hint=size_hint,
        hints=replace(read_size_hint(size_hint), routing=read_routing(routing)),
    )


def _find_settings(device: str, alloc_conf: str | None) -> AllocatorSettings | None:
    if device != "cuda":
        if alloc_conf is not None:
            raise UsageError("the allocator's settings are for CUDA", hint="device='cuda'")
        return None
    if alloc_conf is None:
        alloc_conf = next(filter(None, map(os.environ.get, _ALLOCATOR_VARIABLES)), "")
    return parse_settings(alloc_conf)


def resolve_dtype(dtype: DtypeChoice) -> str | None:
    """Finds the name of a dtype that a caller chose."""
    return None if dtype is None else parse_dtype(dtype)


def resolve_autocast(autocast: DtypeChoice, target: Backend) -> str | None:
    """Checks the dtype of autocast, and leaves it as the caller wrote it."""
    if autocast is None:
        return None
    if not isinstance(autocast, str | torch.dtype):
        raise UsageError(f"autocast={autocast!r} is not a dtype", hint="bf16, fp16, or None")
    name = parse_dtype(autocast)
    if name not in ("bfloat16", "float16"):
        raise UsageError(f"autocast to {name}", hint="bf16 or fp16")
    if target is CPU and name == "float16":
        raise UsageError("autocast to float16 is not supported on the CPU", hint="bf16")
    return strip_torch(autocast)


def resolve_compilation(
    compile: bool | Mapping[str, Any] | None, activation_memory_budget: float | None
) -> Compilation | None:
    """Checks how code is to be compiled; returns None for eager figures."""
    budget = activation_memory_budget
    if not isinstance(compile, bool | Mapping | None):
        raise UsageError(
            f"compile={compile!r}", hint="True, False, or torch.compile's arguments in a dict"
        )
    if budget is not None and not 0 <= budget <= 1:
        raise UsageError(
            f"activation_memory_budget={budget!r}",
            hint="from 0 (recompute all) to 1 (PyTorch's default)",
        )
    if compile is False:
        if budget is not None:
            raise UsageError(
                "activation_memory_budget is for compiled code", hint="leave one of them out"
            )
        return None
    model = dict(compile) if isinstance(compile, Mapping) else {} if compile else None
    return Compilation(model, budget)


def resolve_frontend(frontend: str | None, layout: Layout | None) -> str | None:
    """Checks the tracer that a caller asks for; a step of one rank of many is recorded."""
    if frontend not in (None, *FRONTENDS):
        raise UsageError(f"unknown frontend {frontend!r}", hint="fx or record")
    if layout is not None and frontend == "fx":
        raise UsageError("the fx frontend with a mesh", hint="leave the frontend out")
    return frontend if layout is None else "record"


def check_mode(mode: object, inference_mode: bool = False) -> None:
    """Raises UsageError unless a mode is ``train`` or ``infer``, which inference_mode needs."""
    if mode not in MODES:
        raise UsageError(
            f"unknown mode {mode!r}",
            hint="did you mean infer?" if mode == "eval" else "train, infer or generate",
        )
    if inference_mode and mode == "train":
        raise UsageError(f"inference_mode with mode={mode!r}", hint="mode='infer' (--mode infer)")


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
