"""Options of an analysis; tests/unit/test_api.py has those that are refused."""

from __future__ import annotations

import torch

from fxmem.kernels.cpu import CPU
from fxmem.kernels.cuda import CUDA
from fxmem.kernels.cuda.gpu import Gpu
from fxmem.training.options import resolve_options


def test_cuda_in_general_is_an_a100_without_end() -> None:
    options = resolve_options()
    assert (options.target, options.gpu, options.architecture) == (CUDA, None, Gpu())


def test_a_gpu_decides_the_architecture() -> None:
    options = resolve_options(gpu="4090")
    assert options.gpu is not None and options.gpu.key == "rtx4090"
    assert options.architecture == Gpu((8, 9), multiprocessors=128, threads_per_multiprocessor=1536)


def test_dtypes_have_one_name_and_autocast_the_caller_s() -> None:
    options = resolve_options(device=torch.device("cpu"), dtype=torch.float16, autocast="bf16")
    assert (options.target, options.dtype) == (CPU, "float16")
    assert (options.autocast, options.autocast_to) == ("bf16", torch.bfloat16)
