"""Batches of samples of different sizes, against analyses of all of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fxmem
from fxmem.batching.batchings import list_batchings, read_sizes
from fxmem.gpus import find_gpu

SIZES = [5, 60, 7, 33, 21, 64, 12, 9, 40, 18, 3, 27, 51, 8, 30, 11]


class Attention(nn.Module):
    """Keeps scores that grow with the square of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, dim=-1)
        return (q @ k.transpose(1, 2)).softmax(-1) @ v


def analyze(size: int, rows: int = 2, **options: Any) -> fxmem.Analysis:
    return fxmem.analyze(Attention(), f"{rows}x{size}x32", optimizer="adam", **options)


def test_every_way_has_the_peaks_of_its_batches() -> None:
    options: dict[str, Any] = {"optimizer": "adam", "device": "cpu", "cap": 40}
    found = fxmem.batches(Attention(), "2x16x32", sizes=SIZES, **options)
    assert [each.batching.name for each in found.batchings] == [
        "padded",
        "grouped",
        "packed",
        "capped",
    ]
    for each in found.batchings:
        steps = [analyze(size, each.batching.rows, device="cpu") for size in each.batching.sizes]
        peaks = sorted(step.peak_bytes for step in steps)
        assert each.quantile_bytes == tuple(
            peaks[int(share * (len(peaks) - 1))] for share in (0.5, 0.9, 0.99, 1)
        )
        assert steps[each.fullest - 1].peak_bytes == peaks[-1]
        assert each.flops == sum(step.forward_flops + step.backward_flops for step in steps)
    assert found.error == 0 and found.fragmentation == ()
    assert found.analyses <= 9


def test_the_fullest_batch_may_be_shorter_than_others() -> None:
    target, sizes = "examples/gpt.py:GPT", (64, 124, 125, 126, 127, 128)
    peaks = {
        size: fxmem.analyze(target, f"8x{size}:int64", optimizer="adamw").peak_bytes
        for size in sizes
    }
    options: dict[str, Any] = {"optimizer": "adamw", "replay": 1}
    options["sizes"] = dict.fromkeys(sizes, 8)
    grouped = fxmem.batches(target, "8x128:int64", **options).batchings[1]
    assert sorted(grouped.batching.sizes) == list(sizes)
    fullest = grouped.batching.sizes[grouped.fullest - 1]
    assert fullest == max(peaks, key=peaks.__getitem__) < 128
    assert grouped.quantile_bytes[-1] == peaks[fullest]


def test_batches_that_do_not_fit_are_counted() -> None:
    reserve = find_gpu("t4").capacity_bytes - 640 * 2**20
    sizes = [100, 200, 1400, 1500, 150, 1600, 120, 110]
    options: dict[str, Any] = {"gpu": "t4", "reserve": reserve, "optimizer": "adam"}
    found = fxmem.batches(Attention(), "1x16x32", sizes=sizes, **options)
    fits = {size: analyze(size, 1, gpu="t4", reserve=reserve).fits for size in sizes}
    padded = found.batchings[0]
    assert padded.unfitting == sum(not fits[size] for size in padded.batching.sizes) > 0
    assert found.fragmentation[0].failed == 1 + next(
        at for at, size in enumerate(padded.batching.sizes) if not fits[size]
    )


class Halving(nn.Module):
    """Takes images of even sides alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        small = nn.functional.max_pool2d(x, 2)
        return self.scale * nn.functional.interpolate(small, scale_factor=2.0) + x


def test_sizes_that_the_model_refuses_are_told() -> None:
    with pytest.raises(fxmem.TraceError, match=r"at size 9: .*give --multiple-of or --cap"):
        fxmem.batches(Halving(), "1x3x16x16", sizes=[8, 9], axis="2,3", device="cpu")
    options: dict[str, Any] = {"axis": "2,3", "device": "cpu", "multiple_of": 2}
    found = fxmem.batches(Halving(), "1x3x16x16", sizes=[8, 9], **options)
    assert found.batchings[0].batching.padding == 1 - (8 * 8 + 9 * 9) / (8 * 8 + 10 * 10)
    options = {"axis": "2,3", "device": "cpu", "cap": 8}
    cut = fxmem.batches(Halving(), "1x3x16x16", sizes=[8, 9], **options)
    assert [(each.batching.name, each.batching.sizes) for each in cut.batchings] == [
        ("capped", (8, 8))
    ]
    assert cut.setup.notes[-1].startswith("All samples are cut at 8: at size 9: ")


def test_odd_sides_of_images_have_the_peaks_that_analyses_have() -> None:
    net = nn.Sequential(*(nn.Conv2d(3 if not at else 8, 8, 3, 2) for at in range(4)))
    sizes = [random.Random(number).randint(40, 200) for number in range(80)]
    found = fxmem.batches(net, "2x3x64x64", sizes=sizes, axis="2,3", device="cpu")
    for way in found.batchings:
        for size, peak_bytes in zip(way.quantile_sizes, way.quantile_bytes, strict=True):
            step = fxmem.analyze(net, f"2x3x{size}x{size}", device="cpu")
            assert step.peak_bytes == peak_bytes
        steps = [fxmem.analyze(net, f"2x3x{s}x{s}", device="cpu") for s in way.batching.sizes]
        flops = sum(step.forward_flops + step.backward_flops for step in steps)
        assert way.flops == pytest.approx(flops, rel=0.02)
    assert found.error < 0.03


def test_images_are_not_packed() -> None:
    net = nn.Conv2d(3, 8, 3, padding=1)
    options: dict[str, Any] = {"sizes": "8-32", "axis": "2,3", "device": "cpu", "multiple_of": 8}
    found = fxmem.batches(net, "4x3x16x16", **options)
    assert [each.batching.name for each in found.batchings] == ["padded", "grouped"]
    assert {*found.batchings[0].batching.sizes} <= {8, 16, 24, 32}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": "9-3"}, "bad range '9-3' (64-2048)"),
        ({"sizes": "none.json"}, "cannot read the sizes 'none.json': No such file or directory"),
        ({"sizes": []}, "sizes: no sizes, or one below 1"),
        ({"sizes": [4, 0]}, "sizes: no sizes, or one below 1"),
        ({"sizes": [1.5]}, "sizes: sizes are whole numbers ('float' object cannot be"),
        ({"sizes": {3: 10**9}}, "sizes: more than 10,000,000 samples"),
        ({"sizes": [4], "axis": 0}, "dimension 0 is the batch (--axis 1, or 2,3 for images)"),
        ({"sizes": [4], "cap": 0}, "the cap, the multiple and the replayed batches must be 1 or"),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fxmem.UsageError) as error:
        fxmem.batches(Attention(), "2x16x32", **options)
    assert str(error.value).startswith(message)


def test_a_file_that_is_no_json_is_told(tmp_path: Path) -> None:
    path = tmp_path / "sizes.json"
    path.write_text("12\n13")
    with pytest.raises(fxmem.UsageError, match=r"sizes.json is no JSON: Extra data: line 2"):
        read_sizes(str(path))
    path.write_text(json.dumps({"12": 3}))
    assert read_sizes(str(path)) == (12, 12, 12)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=80), st.integers(1, 8), st.integers(1, 50))
def test_ways_keep_all_samples(sizes: list[int], rows: int, cap: int) -> None:
    padded, grouped, packed, *capped = list_batchings(sizes, rows, cap=cap)
    steps = max(len(sizes) // rows, 1)
    assert len(padded.sizes) == len(grouped.sizes) == steps
    assert max(padded.sizes) == max(grouped.sizes) == packed.sizes[0]
    assert padded.sample_elements == grouped.sample_elements == packed.sample_elements
    if len(sizes) >= rows:
        assert sum(grouped.sizes) <= sum(padded.sizes) or len(sizes) > 50 * rows
        assert 0 <= packed.padding < 1 and 0 <= grouped.padding < 1
    for each in capped:
        assert max(each.sizes) == cap < max(padded.sizes) and each.cut > 0
