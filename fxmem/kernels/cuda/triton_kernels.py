"""Kernels in Triton, which are not launched on fake tensors.

A kernel allocates nothing: what it writes is among its arguments. Only its values are lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from fxmem.fakes.values import forget_value
from fxmem.kernels.cuda.gpu import CUDA, GPU_DEVICE, current_gpu, measure_shared_memory
from fxmem.patching import change_items, patch
from fxmem.tracing.compiled import patch_when_imported


@CUDA.context
def _leave_out_kernels() -> contextlib.AbstractContextManager[None]:
    return patch_when_imported("triton.runtime.jit", _replace_launches)


@contextlib.contextmanager
def _replace_launches(jit: Any) -> Iterator[None]:
    """Replaces the launch of all kernels: those with heuristics or an autotuner are interfaces too.

    Args:
        jit: ``triton.runtime.jit``.
    """
    make_launch = jit.KernelInterface.__getitem__
    on_real_gpu = dict(vars(jit.driver))

    def make_launch_of_fakes(kernel: Any, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            tensors = (getattr(leaf, "base", leaf) for leaf in tree_leaves((args, kwargs)))
            fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
            if not fakes:
                with change_items(vars(jit.driver), on_real_gpu):
                    return make_launch(kernel, grid)(*args, **kwargs)
            for fake in fakes:  # any may be written
                forget_value(fake)
            if getattr(kernel, "configs", None):  # an autotuner, whose choice mamba_ssm reads
                kernel.best_config = kernel.configs[0]
            return None

        return launch

    with (
        patch({jit.KernelInterface: {"__getitem__": make_launch_of_fakes}}),
        change_items(vars(jit.driver)),
    ):
        jit.driver.set_active(_describe_driver())
        yield


def _describe_driver() -> SimpleNamespace:
    """Describes the GPU as ``triton/backends/nvidia/driver.py`` does, without one."""
    gpu = current_gpu()
    major, minor = gpu.capability
    properties = {
        "max_shared_mem": measure_shared_memory(gpu.capability),
        "max_num_regs": 65536,
        "multiprocessor_count": gpu.multiprocessors,
        "warpSize": 32,
    }
    target = SimpleNamespace(backend="cuda", arch=10 * major + minor, warp_size=32)
    return SimpleNamespace(
        utils=SimpleNamespace(get_device_properties=lambda _device=0: properties),
        get_current_target=lambda: target,
        get_current_device=lambda: GPU_DEVICE.index,
        get_device_capability=lambda _device=0: gpu.capability,
        get_current_stream=lambda _device=0: 0,
        get_active_torch_device=lambda: torch.device("cuda", GPU_DEVICE.index),
        get_device_interface=lambda: torch.cuda,
        get_benchmarker=lambda: None,  # Triton 3.3 asks where an autotuner is made
    )
