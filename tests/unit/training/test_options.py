"""Options of an analysis; tests/unit/test_api.py has those that are refused."""

from __future__ import annotations

from dataclasses import replace

import torch

from fxmem.kernels.cpu import CPU
from fxmem.kernels.cuda import CUDA
from fxmem.kernels.cuda.gpu import Gpu
from fxmem.training.options import resolve_autocast, resolve_device, resolve_dtype


def test_cuda_in_general_is_an_a100_without_end() -> None:
    options = resolve_device("cuda", None, None, None, None)
    assert (options.target, options.gpu, options.architecture) == (CUDA, None, Gpu())


def test_a_gpu_decides_the_architecture() -> None:
    options = resolve_device("cuda", "4090", None, None, None)
    assert options.gpu is not None and options.gpu.key == "rtx4090"
    assert options.architecture == Gpu((8, 9), multiprocessors=128, threads_per_multiprocessor=1536)


def test_dtypes_have_one_name_and_autocast_the_caller_s() -> None:
    options = resolve_device(torch.device("cpu"), None, None, None, None)
    assert (options.target, resolve_dtype(torch.float16)) == (CPU, "float16")
    options = replace(options, autocast=resolve_autocast("bf16", CPU))
    assert (options.autocast, options.autocast_to) == ("bf16", torch.bfloat16)
