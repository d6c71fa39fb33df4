"""The peak of a step that really runs."""

from __future__ import annotations

import torch
from torch.profiler import record_function

from fxmem.verifying.measuring import measure_peak, sum_storages, watch_allocations

CPU = torch.device("cpu")


def test_allocations_are_those_of_their_span() -> None:
    with watch_allocations() as seen:
        with record_function("span one"):
            kept = torch.empty(1024)
            torch.empty(2048)
        with record_function("span two"):
            del kept
    assert seen == {"span one": [4096, 8192, -8192], "span two": [-4096]}


def test_a_peak_counts_what_the_step_holds_at_once() -> None:
    held: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        torch.empty(4096)
        held.append(torch.empty(1024))
        return torch.empty(2048)

    there = [torch.empty(5)]
    assert measure_peak(list, lambda: there, step, held.clear, CPU) == 4 * (5 + 4096)
    more = measure_peak(list, list, lambda: [step(), torch.empty(4096)], held.clear, CPU)
    assert (more, held) == (4 * 7168, [])


def test_what_a_step_replaces_is_there_until_then() -> None:
    kept = {"table": torch.empty(4096)}

    def step() -> None:
        torch.empty(1024)
        del kept["table"]
        kept["table"] = torch.empty(4096)
        torch.empty(2048)

    residents = lambda: [kept["table"]]  # noqa: E731
    assert measure_peak(list, residents, step, list, CPU) == 4 * 6144


def test_storages_are_counted_once_and_in_whole() -> None:
    whole = torch.zeros(100)
    sparse = torch.eye(3).to_sparse()  # 2 x 3 indices of 8 bytes, 3 values of 4
    assert sum_storages([whole, whole[:2], whole.view(10, 10)], CPU) == 400
    assert sum_storages([sparse], CPU) == 60
    assert sum_storages([whole.to("meta")], CPU) == 0
