"""Advice as text, from records made by hand."""

from __future__ import annotations

from hand_made import make_analysis

from fxmem.advice.record import Advice
from fxmem.report.advice_text import render_advice
from fxmem.report.cells import measure_width
from fxmem.report.describing import describe_subject
from fxmem.report.text import write_subject

MIB = 2**20
ADVICE = (
    Advice("Run forward under autocast", 'autocast="bf16"', 12 * MIB, 18 * MIB, "Numerics change."),
    Advice("Free \x1b[2J gradients", "zero_grad(set_to_none=True)", 28 * MIB, 2 * MIB, "None."),
)
TEXT = """\
What else lowers the peak of 30.00 MiB, each by itself and without a plan:

- 18.00 MiB off the peak, 12.00 MiB left: Run forward under autocast.
  Write: autocast="bf16"
  Cost: Numerics change.

- 2.00 MiB off the peak, 28.00 MiB left: Free \\x1b[2J gradients.
  Write: zero_grad(set_to_none=True)
  Cost: None.
"""


def test_advice_after_a_plan() -> None:
    assert render_advice(ADVICE, 30 * MIB) == TEXT


def test_advice_by_itself_says_what_it_is_for() -> None:
    subject = describe_subject(make_analysis())
    text = render_advice(ADVICE, 30 * MIB, subject)
    assert text == f"Peak 30.00 MiB\n{write_subject(subject)}\n\n{TEXT}"


def test_lines_fit_a_width() -> None:
    text = render_advice(ADVICE, 30 * MIB, width=40)
    assert max(map(measure_width, text.splitlines())) <= 40
    assert text.split() == TEXT.split()


def test_no_advice_is_told() -> None:
    expected = "Nothing else that was tried lowers the peak by 0.5 % or 1 MiB.\n"
    assert render_advice((), 30 * MIB) == expected
