from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fxmem.errors import UsageError
from fxmem.memory.allocator.settings import AllocatorSettings, parse_settings

MIB = 1024**2


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", {}),
        ("max_split_size_mb:128", {"max_split_bytes": 128 * MIB}),
        (
            " max_split_size_mb : 128 , expandable_segments : True , ",
            {"max_split_bytes": 128 * MIB, "expandable_segments": True},
        ),
        ("max_split_size_mb:128,max_split_size_mb:64", {"max_split_bytes": 64 * MIB}),
        ("max_non_split_rounding_mb:30", {"max_non_split_rounding_bytes": 30 * MIB}),
        # What a block that is not split may be too large follows the segments of small requests.
        (
            "large_segment_size_mb:40",
            {"large_segment_bytes": 40 * MIB, "max_non_split_rounding_bytes": 40 * MIB},
        ),
        (
            "garbage_collection_threshold:0.8,expandable_segments:True",
            {"expandable_segments": True},
        ),
        (
            "backend:native,release_lock_on_cudamalloc:True,pinned_use_cuda_host_register:True,"
            "pinned_num_register_threads:8,pinned_use_background_threads:False,"
            "throw_on_cudamalloc_oom:False",
            {},
        ),
    ],
)
def test_settings_are_read(text: str, settings: dict[str, Any]) -> None:
    assert parse_settings(text) == AllocatorSettings(**settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "max_split_size_mb",
            "bad allocator setting 'max_split_size_mb' (write key:value,key:value)",
        ),
        ("foo:1,bar:2", "unknown allocator setting 'foo' (max_split_size_mb, "),
        (
            "max_split_size_mb:128M",
            "max_split_size_mb takes a whole number, not '128M' (e.g. max_split_size_mb:128)",
        ),
        (
            "max_split_size_mb:30,large_segment_size_mb:40",
            "max_split_size_mb:30 is too small (40 or more)",
        ),
        ("large_segment_size_mb:10", "large_segment_size_mb:10 is too small (11 or more)"),
        ("expandable_segments:true", "expandable_segments takes True or False, not 'true'"),
        (
            "garbage_collection_threshold:0.8,per_process_memory_fraction:0.9",
            "garbage collection under per_process_memory_fraction is not simulated "
            "(leave one of them out)",
        ),
        (
            "per_process_memory_fraction:half",
            "per_process_memory_fraction takes a share between 0 and 1, not 'half' "
            "(per_process_memory_fraction:0.8)",
        ),
        ("roundup_power2_divisions:3", "roundup_power2_divisions takes powers of two, not 3"),
        (
            "roundup_power2_divisions:[256:1",
            "roundup_power2_divisions lacks the closing bracket "
            "(roundup_power2_divisions:[256:1,512:2,>:4])",
        ),
        ("backend:cudaMallocAsync", "backend:cudaMallocAsync is not simulated (leave it out)"),
    ],
)
def test_settings_that_cannot_be_read_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_settings(text)
    assert str(raised.value).startswith(message)


@pytest.fixture
def pytorch_divisions() -> Iterator[Callable[[str], list[int]]]:
    """PyTorch's own reading of ``roundup_power2_divisions``, per size of 1 MiB to 64 GiB."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    name = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"
    find_divisions = getattr(library, name)
    find_divisions.argtypes, find_divisions.restype = [ctypes.c_size_t], ctypes.c_size_t

    def read(text: str) -> list[int]:
        torch._C._accelerator_setAllocatorSettings(text)
        return [find_divisions(MIB << power) for power in range(17)]

    yield read
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")


@pytest.mark.parametrize(
    "value",
    """
    4 1 [256:1,512:2,>:4] [256:1,512:2,1024:4,>:8] [64:8,256:4]
    [64:8,128:2,256:4,512:2,1024:4,>:1] [>:4] [1:2,2:0] [131072:4] [8:2,>:4] [32768:2,>:4]
    """.split(),
)
def test_divisions_are_read_as_by_pytorch(
    value: str, pytorch_divisions: Callable[[str], list[int]]
) -> None:
    text = f"roundup_power2_divisions:{value}"
    settings = parse_settings(text)
    expected = pytorch_divisions(text)
    assert [settings.find_divisions(MIB << power) for power in range(17)] == expected
    assert settings.find_divisions(1) == expected[0]


@pytest.mark.parametrize(
    "text",
    """
    max_split_size_mb:19 large_segment_size_mb:10 max_split_size_mb:30,large_segment_size_mb:40
    expandable_segments:true garbage_collection_threshold:1.0 garbage_collection_threshold:0
    roundup_power2_divisions:3 roundup_power2_divisions:[100:2] max_split_size_mb:
    """.split(),
)
def test_what_pytorch_refuses_is_refused(text: str) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        torch._C._accelerator_setAllocatorSettings(text)
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
    with pytest.raises(UsageError):
        parse_settings(text)
