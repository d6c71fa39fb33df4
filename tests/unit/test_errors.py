from __future__ import annotations

import pytest
from torch._utils import ExceptionWrapper

import fxmem
from fxmem.errors import FxmemError, summarize_error


def test_an_error_is_one_line_with_what_to_try() -> None:
    error = FxmemError("no module\n  named 'nets'", hint="look at\tPYTHONPATH")
    assert str(error) == "no module named 'nets' (look at PYTHONPATH)"
    assert (error.cause, error.hint) == ("no module named 'nets'", "look at PYTHONPATH")
    assert str(FxmemError("no")) == "no"


def test_errors_are_fxmem_s_and_exit_2() -> None:
    for kind in (fxmem.UsageError, fxmem.LoadError, fxmem.TraceError, fxmem.DataDependentError):
        assert issubclass(kind, FxmemError) and kind.exit_code == 2


def test_a_summary_ends_with_the_first_cause() -> None:
    missing = ModuleNotFoundError("No module named 'flash_attn'")
    lazy = ImportError("Could not import module 'GPT2LMHeadModel'.")
    lazy.__cause__ = missing
    text = "ImportError: Could not import module 'GPT2LMHeadModel'."
    assert (
        summarize_error(lazy) == f"{text}, from ModuleNotFoundError: No module named 'flash_attn'"
    )
    repeats = RuntimeError("failed: no width")
    repeats.__cause__ = ValueError("no width\nframe #0: ...")
    assert summarize_error(repeats) == "RuntimeError: failed: no width"
    repeats.__cause__ = repeats
    assert summarize_error(repeats) == "RuntimeError: failed: no width"


def test_an_error_of_a_loader_s_worker_is_what_was_raised_there() -> None:
    try:
        int("no number")
    except ValueError:
        wrapper = ExceptionWrapper(where="in DataLoader worker process 0")  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError) as raised:
        wrapper.reraise()
    assert summarize_error(raised.value) == (
        "ValueError: invalid literal for int() with base 10: 'no number' "
        "(in DataLoader worker process 0)"
    )
