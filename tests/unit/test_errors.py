from __future__ import annotations

import pytest

import fxmem
from fxmem.errors import DataDependentError, FxmemError, LoadError, TraceError, UsageError


def test_an_error_is_one_line_with_what_to_try() -> None:
    error = FxmemError("no module\n  named 'nets'", hint="look at\tPYTHONPATH")
    assert str(error) == "no module named 'nets' (look at PYTHONPATH)"
    assert (error.cause, error.hint) == ("no module named 'nets'", "look at PYTHONPATH")
    assert str(FxmemError("no")) == "no"


@pytest.mark.parametrize("kind", [UsageError, LoadError, TraceError, DataDependentError])
def test_every_error_is_an_fxmem_error_that_exits_2(kind: type[FxmemError]) -> None:
    assert issubclass(kind, FxmemError)
    assert kind.exit_code == 2
    assert getattr(fxmem, kind.__name__) is kind


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="module 'fxmem' has no attribute 'nothing'"):
        _ = fxmem.nothing
