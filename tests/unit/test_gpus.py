from __future__ import annotations

import pytest

from fxmem.errors import UsageError
from fxmem.gpus import CONTEXT_BYTES, GPUS, find_gpu

MIB = 1024**2


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("RTX 4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("GTX 1080Ti", "gtx1080ti"),
        ("Tesla T4", "t4"),
        ("V100-PCIE-32GB", "v100-32gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("nvidia h100 nvl", "h100-nvl"),
        ("A6000", "rtx-a6000"),
        ("RTX 6000 Ada", "rtx6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
    ],
)
def test_a_gpu_is_found_by_its_names(text: str, key: str) -> None:
    assert find_gpu(text).key == key


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rtx4091", "unknown GPU 'rtx4091' (did you mean rtx4090?)"),
        ("MI300X", "unknown GPU 'MI300X' (e.g. h100, a100-80gb, rtx4090, t4)"),
        ("RTX", "unknown GPU 'RTX' (e.g. h100, a100-80gb, rtx4090, t4)"),
        (
            "a100",
            "several GPUs are called 'a100' (choose one of a100-40gb, a100-80gb, a100-80gb-pcie)",
        ),
    ],
)
def test_another_name_is_refused_with_near_ones(text: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        find_gpu(text)
    assert str(raised.value) == message


def test_what_is_known_of_gpus_fits_together() -> None:
    for key, gib in {"gtx1080ti": 11, "rtx4090": 24, "t4": 16, "a100-80gb": 80}.items():
        assert 0.9 * gib * 1024**3 < find_gpu(key).capacity_bytes < gib * 1024**3
    # PyTorch 2.10 on an RTX 6000 Ada gave 50,865,307,648 bytes.
    assert 0 <= 50_865_307_648 - find_gpu("rtx6000-ada").capacity_bytes < MIB
    assert len({gpu.key for gpu in GPUS}) == len(GPUS)
    for gpu in GPUS:
        assert find_gpu(gpu.key) is find_gpu(gpu.name) is gpu
        assert 10**11 < gpu.bandwidth_bytes_per_s < 10**13, gpu.key
        assert 5 * 10**12 < gpu.fp32_flops_per_s < 2 * 10**14, gpu.key
        assert (gpu.half_flops_per_s is None) == (gpu.capability < (7, 0)), gpu.key
        assert (gpu.tf32_flops_per_s is None) == (gpu.capability < (8, 0)), gpu.key
        assert (gpu.half_flops_per_s or gpu.fp32_flops_per_s) >= gpu.fp32_flops_per_s, gpu.key
    assert 0 < CONTEXT_BYTES[0] < CONTEXT_BYTES[1]
