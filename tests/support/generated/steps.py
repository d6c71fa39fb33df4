"""Steps of generated programs: as fxmem sees them, and what a plan for them has to keep to."""

from __future__ import annotations

import fxmem
from fxmem.analysis import Analysis
from generated.modules import Program


def analyse(program: Program, mode: str = "train") -> Analysis:
    """Analyses a step of the program's own module."""
    case = program.case()
    return fxmem.analyze(case.model(), case.inputs()[0], device="cpu", mode=mode)


def is_in_graph(program: Program) -> bool:
    """Tells whether a graph holds all that the program does.

    What is kept on the module is no part of the graph; fakes of inputs keep a changed shape.
    """
    return not any(word in program.source for word in ("kept", "unsqueeze_(", ".t_("))


def uses_all_values(analysis: Analysis) -> bool:
    """Tells whether backward comes to all that autograd keeps.

    The user's function holds dead values to its end, and the planned module does not.
    """
    return all(save.unpacked is not None for save in analysis.graph.saves)


def is_promise_kept(promised_bytes: int, recorded_bytes: int) -> bool:
    """Tells whether a planned module takes what was promised.

    Here and there a few numbers go a moment earlier: the sum of a bias, the mean of a row.
    """
    return recorded_bytes <= promised_bytes <= recorded_bytes * 1.0001 + 64
