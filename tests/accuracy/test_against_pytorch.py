"""fxmem's numbers against real steps of PyTorch, measured here and now.

The benchmarks do the same for many more models (``python -m benchmarks.accuracy``); these are
small ones, each with something that an analysis gets wrong easily.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import pytest

from benchmarks.accuracy import analyse, compare_saved, peak_without_workspace
from benchmarks.cases import Case, hugging_face, ids, image, vision
from benchmarks.measure import (
    measure_allocator,
    measure_flops,
    measure_saved,
    measure_tensors,
)
from benchmarks.models import GPT2, find
from benchmarks.step import MODES, Mode
from fxmem.analysis import Analysis

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # A reentrant checkpoint warns where nothing requires grad, as in inference.
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]

OWN = (
    "inplace",
    "tied_weights",
    "reused_module",
    "dict_output",
    "checkpoint_reentrant",
    "checkpoint_non_reentrant",
    "custom_function",
    "views",
    "norms",
    "transformer_pre_norm",
    "low_precision",
)
CASES = {name: (find(name), "") for name in OWN} | {
    "resnet18": (Case("resnet18", vision("resnet18"), (image(2, 3, 64, 64),)), "torchvision"),
    "gpt2": (
        Case("gpt2", hugging_face("GPT2LMHeadModel", "GPT2Config", **GPT2), (ids(2, 32),)),
        "transformers",
    ),
}


@cache
def analysis_of(name: str, mode: Mode) -> Analysis:
    case, package = CASES[name]
    # torchvision's compiled half need not fit this torch: it is imported by the case.
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    result: Analysis = analyse(case, mode)
    return result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_live_tensors_peak_where_they_do(name: str, mode: Mode) -> None:
    analysis = analysis_of(name, mode)
    real = measure_tensors(CASES[name][0], mode, eager_adds=True)
    assert analysis.timeline.resident_bytes == real["resident_bytes"]
    assert peak_without_workspace(analysis) == real["peak_bytes"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_the_allocator_peaks_where_it_does(name: str, mode: Mode) -> None:
    analysis = analysis_of(name, mode)
    real = measure_allocator(CASES[name][0], mode)
    assert analysis.peak_bytes == pytest.approx(real["peak_bytes"], rel=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_autograd_saves_the_same_and_the_work_is_the_same(name: str) -> None:
    analysis, case = analysis_of(name, "train"), CASES[name][0]
    assert compare_saved(analysis, measure_saved(case, "train")) == (True, "")
    assert {
        "forward_flops": analysis.forward_flops,
        "backward_flops": analysis.backward_flops,
    } == measure_flops(case, "train")
