"""Process-wide state during a recording: the machine, PyTorch on it, and random states."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fxmem.compiling.compiler import Compilation, run_compiler
from fxmem.fakes.values import answer_fake_checks
from fxmem.kernels.cuda.present_gpu import show_gpu
from fxmem.kernels.functions import lower_functions
from fxmem.kernels.registry import Backend
from fxmem.loading.pretrained import load_pretrained
from fxmem.loading.target import prepare_targets, silence_fake_kernels
from fxmem.parallelism.layout import Layout
from fxmem.parallelism.process_group import offer_group
from fxmem.patching import hold_process, leave_recording, patch
from fxmem.recording.recorder import Recorder
from fxmem.tracing.compiled import leave_out_compiler, patch_when_imported
from fxmem.tracing.conditions import leave_autocast
from fxmem.training.dead_checkpoints import note_dead_checkpoints
from fxmem.training.options import Options
from fxmem.versions.fallbacks import keeps_casts_in_inference

_CUDA_SETTERS = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state")


class _WatchedGenerator:
    """Stands for the CPU's generator, which stays unchanged."""

    def __init__(self, see_seeding: Callable[..., Any]) -> None:
        self._see_seeding = see_seeding

    def __getattr__(self, name: str) -> Any:
        is_setter = name in ("manual_seed", "set_state")
        return self._see_seeding if is_setter else getattr(torch.default_generator, name)


def watch_random_state(recorder: Recorder) -> contextlib.AbstractContextManager[None]:
    """Reports random states that are copied (as by checkpoints) or set to a recorder.

    States are real tensors, made without an operator. Nothing is set: fake tensors draw nothing,
    and the generators are the user's.
    """
    get_state = torch.get_rng_state

    def get_watched_state() -> torch.Tensor:
        state = get_state()
        with torch._C.DisableTorchFunction():
            recorder.see_random_state(state)
        return state

    def see_seeding(*_args: Any, **_kwargs: Any) -> torch.Generator:
        recorder.see_seeding()
        return torch.default_generator

    return patch(
        {
            torch.cuda: dict.fromkeys(_CUDA_SETTERS, see_seeding),
            torch: {"get_rng_state": get_watched_state},
            torch.random: {
                "get_rng_state": get_watched_state,
                # As `from torch import manual_seed` finds it too.
                "default_generator": _WatchedGenerator(see_seeding),
            },
        }
    )


class _Inference(threading.local):
    is_on = False
    caches_outside = True


def replace_inference_mode() -> contextlib.AbstractContextManager[None]:
    """Replaces ``torch.inference_mode`` with ``no_grad`` and its other effects.

    The real one leaves autograd's keys out of the dispatcher. Then composite operators reach a
    ``TorchDispatchMode`` whole, and some views of fake tensors that were made outside fail. Memory
    depends on two effects that are kept: autocast keeps no casts of weights from 2.11 on, and
    autograd records nothing, whatever ``enable_grad`` says. Source: ``c10/core/InferenceMode.h``;
    ``cached_cast`` in ``aten/src/ATen/autocast_mode.cpp``,
    https://github.com/pytorch/pytorch/pull/165068.
    """
    inference, may_cache = _Inference(), keeps_casts_in_inference()
    set_grad, set_cache = torch._C._set_grad_enabled, torch.set_autocast_cache_enabled

    @contextlib.contextmanager
    def enter(mode: bool) -> Iterator[None]:
        was_on, has_grad = inference.is_on, torch.is_grad_enabled()
        caches = torch.is_autocast_cache_enabled()
        if not was_on:
            inference.caches_outside = caches
        inference.is_on = mode
        set_grad(not mode)
        set_cache(inference.caches_outside and (may_cache or not mode))
        try:
            yield
        finally:
            inference.is_on = was_on
            set_grad(has_grad)
            set_cache(caches)

    def set_grad_outside(enabled: bool) -> None:
        set_grad(enabled and not inference.is_on)

    def set_cache_outside(enabled: bool) -> None:
        set_cache(enabled and (may_cache or not inference.is_on))

    return patch(
        {
            torch._C: {"_InferenceMode": enter, "_set_grad_enabled": set_grad_outside},
            torch: {
                "set_autocast_cache_enabled": set_cache_outside,
                "is_inference_mode_enabled": lambda: inference.is_on,
            },
        }
    )


@contextlib.contextmanager
def offer_machine(
    options: Options | None,
    layout: Layout | None = None,
    *,
    count: Callable[[], int] | None = None,
    memory: Mapping[str, Callable[..., Any]] | None = None,
) -> Iterator[None]:
    """Runs code as in a process of its own, on a machine with the options' target.

    Args:
        options: Their target is the device; None for a machine without a GPU.
        layout: The process is a rank of it.
        count: Counts the GPUs; by default there is one for each rank.
        memory: As for :func:`show_gpu`.
    """
    gpu, world_size = None, 1 if layout is None else layout.world_size
    if options is not None and options.target.name == "cuda":
        gpu = options.architecture
    with (
        hold_process(),
        leave_autocast(),
        silence_fake_kernels(),
        load_pretrained(),
        # Which loads the library for a GPU that it sees: it is imported as if there were none.
        patch_when_imported("bitsandbytes", lambda _package: contextlib.nullcontext()),
        offer_group(layout, "gloo" if gpu is None else "nccl"),
        contextlib.nullcontext()
        if gpu is None
        else show_gpu(gpu, memory, count=count or (lambda: world_size)),
    ):
        yield


@contextlib.contextmanager
def isolate_analysis(
    *choices: object, options: Options | None = None, layout: Layout | None = None
) -> Iterator[None]:
    """Runs an analysis of arguments that may be a TARGET as in a process of its own.

    Within, there is a GPU where the options' target is one; without options there is none.
    """
    with (
        hold_process(),
        leave_recording(),
        torch.inference_mode(False),
        torch.enable_grad(),
        offer_machine(options, layout),
        prepare_targets(*choices),
    ):
        yield


@contextlib.contextmanager
def imitate_target(
    recorder: Recorder, target: Backend, compilation: Compilation | None
) -> Iterator[Mapping[str, None]]:
    """Runs PyTorch's own code as on the target, and yields notes on what runs otherwise.

    Args:
        recorder: Records the operators.
        target: The device.
        compilation: The way ``torch.compile`` compiles; None to leave the compiler out.
    """
    with (
        recorder.watch_resizing(),
        recorder.casts.watch_exits(),
        patch_when_imported("transformers.utils.import_utils", answer_fake_checks),
        note_dead_checkpoints(recorder.notes),
        lower_functions(target) as notes,
        leave_out_compiler(recorder.notes)
        if compilation is None
        else run_compiler(recorder, target, compilation),
        replace_inference_mode(),
    ):
        yield notes
