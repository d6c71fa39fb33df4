"""Memory budgets of tests: fxmem's plugin for pytest.

Not a module of fxmem, for pytest imports it in every run of every project where fxmem is
installed: fxmem, and torch, are imported when a test analyses something.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fxmem import Analysis

_MARK, _FIXTURE = "fxmem_budget", "fxmem_analyze"
_HELP = f"{_MARK}(size): fail if an analysis by {_FIXTURE} peaks over the size, such as '8 GiB'"
_TOP = 10


def pytest_configure(config: pytest.Config) -> None:
    """Registers the mark."""
    config.addinivalue_line("markers", _HELP)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuses a budget that nothing would be held to."""
    mark = item.get_closest_marker(_MARK)
    if mark is None:
        return
    if len(mark.args) != 1 or mark.kwargs:
        pytest.fail(f"{_MARK} takes one size: @pytest.mark.{_MARK}('8 GiB')", pytrace=False)
    if _FIXTURE not in getattr(item, "fixturenames", ()):
        pytest.fail(f"{_MARK} is for tests that use the fixture {_FIXTURE}", pytrace=False)


@pytest.fixture
def fxmem_analyze(request: pytest.FixtureRequest) -> Callable[..., Analysis]:
    """fxmem.analyze, which fails the test if the peak is over its mark's budget."""
    mark = request.node.get_closest_marker(_MARK)

    def analyze(
        model: Any, args: Any = (), kwargs: dict[str, Any] | None = None, **options: Any
    ) -> Analysis:
        __tracebackhide__ = True
        import fxmem
        from fxmem.comparison.changes import list_storages, read_footprint
        from fxmem.report.blocks import Heading, render_text
        from fxmem.report.text import write_headline, write_subject
        from fxmem.units import format_bytes, resolve_bytes

        try:
            budget_bytes = None if mark is None else resolve_bytes(mark.args[0])
            analysis = fxmem.analyze(model, args, kwargs, **options)
        except fxmem.FxmemError as error:  # which names the user's own line
            raise error.with_traceback(None) from None
        if budget_bytes is not None and analysis.peak_bytes > budget_bytes:
            peak = read_footprint(analysis.to_dict(), str(request.config.rootpath))
            over = format_bytes(analysis.peak_bytes - budget_bytes)
            budget = format_bytes(budget_bytes)
            title = f"{write_headline(peak.headline)}, {over} over the budget of {budget}"
            blocks = Heading(title, [write_subject(peak.setup)]), list_storages(peak, _TOP)
            pytest.fail(render_text(blocks).rstrip("\n"), pytrace=False)
        return analysis

    return analyze
