"""A verification as text, on results made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hand_made_plans import make_verification

from fxmem.verifying.verification import Difference, Kind, Promise, StepFigures, describe_difference

EQUAL = make_verification(
    promise=Promise(20 << 20, is_plans_own=True, deviation=0.0, is_kept=True),
    notes=("No peak is predicted: the step failed.",),
)
VALUE = Difference(2, Kind.GRADIENT, "fc.weight", "value", (1, 0), "0.5", "-0", 3, 0.625)
DIFFERENT = replace(
    EQUAL,
    equal=False,
    steps=2,
    differences=(VALUE, Difference(2, Kind.BUFFER, "count", "value", (), "1", "2", 1, 1.0)),
    notes=(),
)


def test_equal() -> None:
    assert f"{EQUAL}\n" == (
        "Equal bit for bit in 3 steps, measured peak 30.00 MiB -> 20.00 MiB, as promised\n"
        "nets/net.py:Net; 8x3:float32; train; cpu; optimizer adam; loss default; seed 7\n"
        "\n"
        "Compared in each step: 1 output, 2 losses, 4 gradients, 12 optimizer states.\n"
        "\n"
        "on the CPU          model  with the plan\n"
        "--------------  ---------  -------------\n"
        "peak, measured  30.00 MiB      20.00 MiB\n"
        "peak, promised                 20.00 MiB\n"
        "peak, analyzed  31.00 MiB              -\n"
        "time of a step   250.0 ms       500.0 ms\n"
        "\n"
        "No peak is predicted: the step failed.\n"
    )


@pytest.mark.parametrize(
    ("promise", "text"),
    [
        (Promise(16 << 20, True, 0.25, False), ", 25.0% above the promised 16.00 MiB"),
        (Promise(25 << 20, False, -0.2, False), ", 20.0% below the promised 25.00 MiB"),
        (Promise(20 << 20, False, 0.001, True), ""),
        (None, ""),
    ],
)
def test_the_first_line_tells_of_the_promise(promise: Promise | None, text: str) -> None:
    head, *rest = str(replace(EQUAL, promise=promise)).splitlines()
    assert head == f"Equal bit for bit in 3 steps, measured peak 30.00 MiB -> 20.00 MiB{text}"
    assert any(line.startswith("peak, promised") for line in rest) is (promise is not None)


def test_different() -> None:
    head, table, *_ = str(DIFFERENT).split("\n\n")
    assert "\n... and 4 more\n" in str(replace(DIFFERENT, differences=(VALUE,) * 14))
    assert head.splitlines()[0] == (
        "Different in step 2: gradient fc.weight[1, 0] is 0.5, with the plan -0"
    )
    assert table.splitlines() == [
        "different  name             in     model  with the plan  elements  apart at most",
        "---------  ---------------  -----  -----  -------------  --------  -------------",
        "gradient   fc.weight[1, 0]  value  0.5    -0                    3          0.625",
        "buffer     count            value  1      2                     1              1",
    ]


def test_a_planned_step_that_fails_has_no_figures() -> None:
    failed = replace(
        DIFFERENT,
        differences=(Difference(1, Kind.ERROR, "step", "ValueError: no"),),
        planned=StepFigures(None, None, None),
        promise=None,
        device="cuda",
    )
    text = str(failed)
    assert text.startswith("Different in step 1: error step: ValueError: no\n")
    assert "\non the GPU " in text
    assert text.endswith("\ntime of a step   250.0 ms              -")


@pytest.mark.parametrize(
    ("difference", "text"),
    [
        (
            Difference(1, Kind.OUTPUT, "output['a']", "shape", None, "2x3", "2"),
            "step 1: output output['a']: shape is 2x3, with the plan 2",
        ),
        (
            Difference(3, Kind.BUFFER, "mean", "missing with the plan"),
            "step 3: buffer mean: missing with the plan",
        ),
        (
            Difference(1, Kind.GRADIENT, "w", "value of indices", (0, 1), "0", "1"),
            "step 1: gradient w[0, 1] is 0, with the plan 1",
        ),
        (
            Difference(1, Kind.OUTPUT, "output", "value", None, "'\x1b'", "''"),
            "step 1: output output is '\x1b', with the plan ''",
        ),
    ],
)
def test_a_difference_in_a_line(difference: Difference, text: str) -> None:
    assert describe_difference(difference) == text
