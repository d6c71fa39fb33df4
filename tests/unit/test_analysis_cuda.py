"""The numbers of an analysis for a GPU, worked out by hand on the hand-made step.

In the order of allocation: parameters of 4 + 4 MiB, a buffer of 1, a state of 2, an input of 2.
Blocks above 1 MiB come from a segment of 20 MiB, of which these take 12; the buffer is half of a
small segment of 2 MiB. Forward takes 4 + 4 more, which fills the large segment, frees the first
of them, and takes the small segment's other half; the loss, of 4 bytes, is a block of 512 in a
second small segment. In backward a gradient of 4 MiB takes the free place, and two blocks of 4 need
a second large segment: 20 + 20 + 2 + 2 MiB are reserved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hand_made import MIB, add_first_step, make_graph, make_setup

from fxmem.analysis import Analysis
from fxmem.gpus import GpuModel, find_gpu
from fxmem.graph import Phase
from fxmem.memory.allocator.settings import AllocatorSettings
from fxmem.report.text import write_fit

PEAK_BYTES = 30 * MIB + 512
RESERVED_BYTES = 44 * MIB


def make_analysis(gpu: GpuModel | None = None, **library: int) -> Analysis:
    name = gpu.name if gpu else None
    setup = make_setup(model="net.py:Net", device="cuda", loss="mse", gpu=name, autocast="bf16")
    graph = make_graph()
    operations = list(graph.operations)
    operations[6] = dataclasses.replace(operations[6], **library)
    graph = dataclasses.replace(graph, operations=tuple(operations))
    return Analysis(setup, graph, AllocatorSettings(), gpu)


def make_gpu(capacity_bytes: int) -> GpuModel:
    return dataclasses.replace(find_gpu("t4"), capacity_bytes=capacity_bytes)


def test_what_is_allocated_and_what_is_reserved() -> None:
    analysis = make_analysis()
    assert analysis.peak_bytes == PEAK_BYTES == sum(analysis.breakdown.values())
    assert analysis.requested_bytes == 30 * MIB + 4
    assert analysis.reserved_bytes == RESERVED_BYTES
    assert analysis.fragmentation_bytes == RESERVED_BYTES - PEAK_BYTES
    assert analysis.process_bytes == (RESERVED_BYTES + 300 * MIB, RESERVED_BYTES + 600 * MIB)
    assert analysis.exhaustion is None and write_fit(analysis) == ""
    # What a library may take is no part of the peak; the first layer's backward holds 29 MiB and
    # the loss.
    analysis = make_analysis(library_bytes=5 * MIB)
    assert analysis.peak_bytes == PEAK_BYTES
    assert analysis.library_peak_bytes == 34 * MIB + 512


@pytest.mark.parametrize(
    ("mib", "fits"), [(644, True), (643, None), (344, None), (343, False), (310, False)]
)
def test_whether_it_fits(mib: int, fits: bool | None) -> None:
    """With a context of 600 MiB, only with one of 300 MiB, or not."""
    analysis = make_analysis(make_gpu(mib * MIB))
    exhaustion, process_bytes = analysis.exhaustion, analysis.process_bytes
    assert analysis.fits is fits
    compiled = dataclasses.replace(
        analysis, setup=dataclasses.replace(analysis.setup, compile="left out")
    )
    assert compiled.fits is (fits or None)  # it takes another amount, mostly less
    assert (exhaustion is None) is (fits is True)
    assert exhaustion is None or exhaustion.is_certain is (fits is False)
    assert process_bytes is not None
    assert (max(process_bytes) <= mib * MIB) is (fits is not False)


def test_where_memory_runs_out() -> None:
    def find_place(mib: int) -> tuple[int | None, Phase | None, str | None, str]:
        found = make_analysis(make_gpu(mib * MIB)).exhaustion
        assert found is not None
        return found.step, found.phase, found.node, found.storage

    in_backward = (5, Phase.BACKWARD, "block.relu", "block.relu")
    assert find_place(643) == find_place(343) == in_backward
    assert find_place(310) == (None, None, None, "fc1.weight")
    data: dict[str, Any] = make_analysis(make_gpu(643 * MIB)).to_dict()
    assert data["reserved_bytes"] == RESERVED_BYTES
    assert data["exhaustion"]["step"] == 5
    assert sum(s["slack_bytes"] for s in data["storages"]) == 508


@pytest.mark.parametrize("mib", [15000, 643, 343, 310])
def test_the_report(mib: int, check_golden: Callable[[str, str], None]) -> None:
    analysis = make_analysis(make_gpu(mib * MIB), library_bytes=5 * MIB)
    text = analysis.to_text(top=2, width=100)
    check_golden(f"hand_made_cuda_{mib}.txt", text)


@pytest.mark.parametrize(
    ("mib", "place"),
    [
        (300, "moving fc1.weight to the GPU"),
        (320, "moving norm.running_mean to the GPU"),
        (622, "in the first step's optimizer step"),
    ],
)
def test_memory_may_run_out_before_the_step(mib: int, place: str) -> None:
    analysis = make_analysis(make_gpu(mib * MIB))
    graph = add_first_step(analysis.graph, state_mib=400)
    text = write_fit(dataclasses.replace(analysis, graph=graph))
    assert text.startswith(f"Does not fit Tesla T4 ({mib}.00 MiB), {place}: out of memory: ")


def test_memory_may_run_out_in_the_first_forward() -> None:
    analysis = make_analysis(make_gpu(340 * MIB))
    graph = add_first_step(analysis.graph, state_mib=1)
    warmup = (*graph.warmup[:5], (-2, 40 * MIB), (-2, -40 * MIB), *graph.warmup[7:])
    graph = dataclasses.replace(graph, warmup=warmup)
    found = dataclasses.replace(analysis, graph=graph).exhaustion
    assert found is not None
    assert (found.step, found.phase, found.node) == (None, Phase.FORWARD, "block.relu")


def test_memory_may_run_out_beside_nccl() -> None:
    analysis = make_analysis(make_gpu(1024 * MIB))
    first, *others = analysis.graph.operations
    operations = (first, dataclasses.replace(others[0], group=("dp",)), *others[1:])
    graph = dataclasses.replace(analysis.graph, operations=operations)
    written = write_fit(dataclasses.replace(analysis, graph=graph))
    text = "Fits Tesla T4 (1.00 GiB) if the CUDA context and NCCL take 556.00 MiB, but not if they "
    assert written.startswith(f"{text}take 2.09 GiB: ")


def test_the_cache_may_have_to_be_given_back() -> None:
    for retries, times in ((1, "once"), (3, "3 times")):
        analysis = make_analysis(make_gpu(14 << 30))
        assert analysis.device_run is not None
        vars(analysis)["device_run"] = dataclasses.replace(analysis.device_run, retries=retries)
        assert write_fit(analysis) == (
            f"Fits Tesla T4 (14.00 GiB), after the allocator has given back its cache {times}."
        )


def test_the_first_step_is_what_the_allocator_made_of_it() -> None:
    analysis = make_analysis()
    graph = add_first_step(analysis.graph, state_mib=30)
    first_step = dataclasses.replace(analysis, graph=graph).first_step
    assert first_step is not None
    assert first_step.peak_bytes == first_step.requested_bytes == 43 * MIB
    # 18 MiB of large blocks in the first segment, the buffer in a small one, the workspace alone
    assert first_step.reserved_bytes == (20 + 2 + 30) * MIB
