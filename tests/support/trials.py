"""Examples that Hypothesis tries: the same each time, so that a failure is news.

``FXMEM_EXAMPLES=5000`` tries so many, with random seeds.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, Phase, settings

EXAMPLES = int(os.environ.get("FXMEM_EXAMPLES", "0"))


def try_examples(count: int, *, are_slow: bool = False) -> settings:
    """The settings of a test; it decorates it.

    Args:
        count: How many examples are tried where nobody asks for more.
        are_slow: Whether an example takes real steps: one that fails is then made smaller only
            where more were asked for, and none is kept.
    """
    options: dict[str, Any] = {}
    if are_slow:
        shrinking = [Phase.shrink] if EXAMPLES else []
        options = {"database": None, "phases": [Phase.explicit, Phase.generate, *shrinking]}
    return settings(
        max_examples=EXAMPLES or count,
        derandomize=not EXAMPLES,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        **options,
    )
