"""How a step is to be recorded: what the caller chose, checked, and what it names, found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fxmem.errors import UsageError
from fxmem.gpus import GpuModel, find_gpu
from fxmem.kernels.cpu import CPU
from fxmem.kernels.cuda import CUDA
from fxmem.kernels.cuda.target import Gpu, describe_gpu
from fxmem.kernels.target import Target
from fxmem.loop import Loop, resolve_loop
from fxmem.recording.frontends import FRONTENDS
from fxmem.specs import parse_dtype, strip_torch

MODES = ("train", "infer")
TARGETS = {target.name: target for target in (CUDA, CPU)}


@dataclass(frozen=True, slots=True)
class Options:
    """What holds whatever the model is.

    Attributes:
        mode: ``train`` or ``infer``.
        inference_mode: See :class:`fxmem.recording.step.Step`.
        target: The device whose kernels run the step.
        gpu: The GPU that is meant; None for any.
        architecture: What of it the choice of kernels depends on.
        dtype: The name of what parameters and floating inputs are cast to, or None.
        autocast: What forward and loss are autocast to, as the caller wrote it, or None.
        autocast_to: The same, as PyTorch takes it.
        loop: The training loop around the model.
        frontend: The frontend asked for, or None.
        size_hint: How many elements ``nonzero`` and the like find; None to refuse them.
    """

    mode: str
    inference_mode: bool
    target: Target
    gpu: GpuModel | None
    architecture: Gpu
    dtype: str | None
    autocast: str | None
    autocast_to: torch.dtype | None
    loop: Loop
    frontend: str | None
    size_hint: int | None


def resolve_options(
    *,
    mode: str = "train",
    inference_mode: bool = False,
    device: str | torch.device = "cuda",
    gpu: str | None = None,
    dtype: str | torch.dtype | None = None,
    autocast: str | torch.dtype | None = None,
    loop: str | Loop = "plain",
    accumulate: int | None = None,
    set_to_none: bool | None = None,
    hold_outputs: bool | None = None,
    frontend: str | None = None,
    size_hint: int | None = None,
) -> Options:
    """Checks the arguments of :func:`fxmem.analyze` of these names, and finds what they name.

    Raises:
        UsageError: One of them is not understood, or does not go with another.

    >>> options = resolve_options(gpu="t4", autocast="fp16")
    >>> options.target.name, options.architecture.capability, options.autocast_to
    ('cuda', (7, 5), torch.float16)
    """
    device = str(device)  # a torch.device has its name
    _check_step(mode, inference_mode, device)
    _check_recording(frontend, size_hint)
    model = _find_gpu(device, gpu)
    autocast = _name_autocast(autocast)
    return Options(
        mode=mode,
        inference_mode=inference_mode,
        target=TARGETS[device],
        gpu=model,
        architecture=describe_gpu(model),
        dtype=None if dtype is None else parse_dtype(dtype),
        autocast=autocast,
        autocast_to=_find_autocast(device, autocast),
        loop=resolve_loop(loop, _list_settings(accumulate, set_to_none, hold_outputs)),
        frontend=frontend,
        size_hint=size_hint,
    )


def check_mode(mode: object) -> None:
    """Checks that there is such a mode.

    Raises:
        UsageError: There is none.
    """
    if mode not in MODES:
        raise UsageError(
            f"unknown mode {mode!r}",
            hint="did you mean infer?" if mode == "eval" else " or ".join(MODES),
        )


def _list_settings(
    accumulate: int | None, set_to_none: bool | None, hold_outputs: bool | None
) -> dict[str, Any]:
    """The fields of a loop that have arguments of their own, where they were given."""
    outputs = None if hold_outputs is None else "next step" if hold_outputs else "step"
    settings = {"accumulate": accumulate, "set_to_none": set_to_none, "outputs": outputs}
    return {name: value for name, value in settings.items() if value is not None}


def _check_step(mode: str, inference_mode: bool, device: str) -> None:
    check_mode(mode)
    if inference_mode and mode != "infer":
        raise UsageError(f"inference_mode with mode={mode!r}", hint="mode='infer' (--mode infer)")
    if device not in TARGETS:
        raise UsageError(f"unknown device {device!r}", hint=" or ".join(TARGETS))


def _check_recording(frontend: str | None, size_hint: int | None) -> None:
    if frontend not in (None, *FRONTENDS):
        raise UsageError(f"unknown frontend {frontend!r}", hint="fx or record")
    if size_hint is not None and not (isinstance(size_hint, int) and size_hint >= 0):
        raise UsageError(
            f"size hint {size_hint!r} is no number of elements", hint="an integer, 0 or more"
        )


def _find_gpu(device: str, gpu: str | None) -> GpuModel | None:
    if gpu is None:
        return None
    if device != "cuda":
        raise UsageError(f"gpu={gpu!r} with device={device!r}", hint="leave one of them out")
    return find_gpu(gpu)


def _name_autocast(autocast: object) -> str | None:
    if autocast is None or isinstance(autocast, str | torch.dtype):
        return None if autocast is None else strip_torch(autocast)
    raise UsageError(f"autocast={autocast!r} is no dtype", hint="bf16, fp16, or None for none")


def _find_autocast(device: str, autocast: str | None) -> torch.dtype | None:
    if autocast is None:
        return None
    name = parse_dtype(autocast)
    if name not in ("bfloat16", "float16"):
        raise UsageError(f"autocast to {name}", hint="bf16 or fp16")
    if device == "cpu" and name == "float16":
        raise UsageError("autocast to float16 on the CPU is not modelled", hint="bf16")
    return getattr(torch, name)  # type: ignore[no-any-return]
