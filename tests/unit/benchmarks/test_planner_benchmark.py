"""The benchmark of plans, on a tiny net and on results made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import benchmarks.planner as planner
from benchmarks.cases import Case, image
from benchmarks.planner_cases import CASES, CHAINED, PlannerCase, build_chain, list_rotor
from benchmarks.planner_measure import Measurement, Numbers
from benchmarks.planner_page import merge_pages, update_page
from examples.planner_nets import DeepResNet
from fxmem.planning.strategies import problem
from fxmem.planning.strategies.chain import StageOption

pytestmark = pytest.mark.usefixtures("one_thread")  # as the benchmark runs

TINY = PlannerCase(
    Case("tiny", lambda: DeepResNet((2, 1), 4), (image(4, 3, 16, 16),)),
    {"every block": CHAINED["every block"]},
)
PLAIN = Measurement(1000, 100, 1.0, "yes")


def raise_error(model: nn.Module) -> nn.Module:
    raise RuntimeError("no | way\nand more")


@pytest.fixture(autouse=True)
def _few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "SMALL_STEP_TRIALS", 5)


def test_plans_of_a_tiny_net_take_what_was_predicted_and_compute_the_same() -> None:
    result = planner.run_case(TINY, points=2, rounds=1)
    assert {row.reason for row in result.by_hand + result.plans} == {""}
    assert {row.error for row in result.plans} == {0.0}
    assert {row.measured and row.measured.equal for row in result.plans} == {"yes"}
    first = result.by_hand[0]
    assert first.measured and first.measured.equal == "not statistics"  # as checkpoints do
    assert first.measured.peak_bytes < result.plain.peak_bytes
    assert len({case.case.name for case in CASES}) == len(CASES)
    page = planner.write_page([result], "made today")
    assert "| every block" in page and "## tiny" in page and "failed" not in page


def test_what_fails_is_a_row_with_its_reason() -> None:
    case = PlannerCase(TINY.case, {"by magic": raise_error})
    result = planner.run_case(case, points=0, rounds=0)
    assert result.by_hand == [planner.Row("by magic", reason="RuntimeError: no | way")]
    assert "RuntimeError: no / way" in planner.tabulate_steps(result)


def test_an_answer_has_no_more_flops_or_no_more_memory() -> None:
    def make(name: str, peak_bytes: int, flops: int) -> planner.Row:
        return planner.Row(name, replace(PLAIN, peak_bytes=peak_bytes, flops=flops))

    worse, better = make("dominated", 500, 130), make("on its own", 390, 119)
    lean, cheap = make("lean", 400, 120), make("cheap", 480, 110)
    result = planner.Result("net", 0, PLAIN, [worse, better], [cheap, lean])
    first, second = planner.find_answers(result)
    assert first == planner.Answer(worse, lean, cheap) and first.is_dominated
    assert second == planner.Answer(better, cheap, None) and not second.is_dominated


def make_result(name: str, peak_bytes: int) -> planner.Result:
    by_hand = planner.Row("every block", replace(PLAIN, peak_bytes=peak_bytes))
    plan = planner.Row("fxmem 1", replace(PLAIN, peak_bytes=peak_bytes // 2))
    return planner.Result(name, 0, PLAIN, [by_hand], [plan])


def test_a_page_keeps_what_was_not_measured_anew(tmp_path: Path) -> None:
    names = ["first", "second", "a third"]
    results = [
        make_result(name, 2**20 * size) for name, size in zip(names, (5, 60, 700), strict=True)
    ]
    whole, path = planner.write_page(results, "made today"), tmp_path / "page.md"
    for result in (results[2], results[0], results[1]):
        update_page(path, planner.write_page([result], "made today"), names)
    assert path.read_text() == whole
    again = make_result("second", 2**20 * 8)
    merged = merge_pages(whole, planner.write_page([again], "made today"), names)
    assert merged == planner.write_page([results[0], again, results[2]], "made today")
    assert [*tmp_path.iterdir()] == [path]


def test_the_chain_of_a_model_has_the_sizes_of_its_modules() -> None:
    model = nn.Module()
    model.stem, model.head = nn.ReLU(), nn.Linear(256, 2, bias=False)
    model.blocks = nn.ModuleList([nn.Tanh()])
    chain = build_chain(model, torch.randn(4, 256))
    # A result of 4096 bytes that is saved, and the gradient of the input beside nothing else.
    elementwise = (StageOption(saved_bytes=4096),)
    assert [stage.options for stage in chain.stages[:2]] == [elementwise, elementwise]
    assert [stage.input_bytes for stage in chain.stages] == [4096, 4096, 4096]
    # The weight's gradient is there when the blocks run backward.
    assert [stage.held_bytes for stage in chain.stages] == [2048, 2048, 0]
    assert chain.stages[2].cost == 2 * 4 * 256 * 2
    assert chain.output_bytes == 4 * 2 * 4
    ways = dict(list_rotor(TINY.case.model(), *TINY.case.inputs()[0]))
    assert [*ways] == [f"rotor {number}" for number in range(1, len(ways) + 1)] and len(ways) > 1


def test_numbers_differ_in_what_differs() -> None:
    one, two = torch.ones(2), torch.zeros(2)
    numbers, other = Numbers(one, {"w": one, "unused": None}, {"mean": one}), {"unused": one}
    assert numbers.compare(replace(numbers)) == "yes"
    assert numbers.compare(replace(numbers, loss=two)) == "loss differs"
    assert numbers.compare(replace(numbers, gradients={"w": one, **other})) == "gradients differ"
    assert numbers.compare(replace(numbers, buffers={"mean": two})) == "not statistics"
