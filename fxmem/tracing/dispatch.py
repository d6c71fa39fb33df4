"""Dispatch modes that cost little."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class LeanDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Without the wrapper that keeps torch.compile out of each operator: nothing is compiled.

    The wrapper would import ``torch._dynamo``, which takes longer than a whole analysis.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
