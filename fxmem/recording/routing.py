"""Ways in which tokens go to the experts of a mixture, where their scores have no values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from fxmem.errors import TraceError, UsageError

Routing: TypeAlias = str | tuple[float, ...]
"""``"balanced"``, ``"worst"``, or the share of each expert."""

_HINT = "balanced, worst, or a number for each expert, such as 4,2,1,1"


def read_routing(routing: str | Sequence[float]) -> Routing:
    """Reads a routing: a name, or how many tokens each expert gets, in any unit.

    Raises:
        UsageError: It is neither.

    >>> read_routing("worst"), read_routing("3,1"), read_routing([30, 10])
    ('worst', (0.75, 0.25), (0.75, 0.25))
    """
    if routing in ("balanced", "worst"):
        return str(routing)
    try:
        numbers = routing.split(",") if isinstance(routing, str) else routing
        counts = [float(number) for number in numbers]
    except (TypeError, ValueError):
        raise UsageError(f"unknown routing {routing!r}", hint=_HINT) from None
    if not counts or min(counts) < 0 or not 0 < sum(counts) < float("inf"):
        raise UsageError(f"bad routing {routing!r}", hint=_HINT)
    return tuple(count / sum(counts) for count in counts)


def name_routing(routing: Routing) -> str:
    """Names a routing in a sentence: tokens are taken as ..."""
    if isinstance(routing, tuple):
        return "in the shares given"
    return "even over the experts" if routing == "balanced" else "all to the same"


def choose_experts(choices: int, width: int, experts: int, routing: Routing) -> Tensor:
    """Chooses the experts of tokens that have so many choices each: one after the other, flat.

    Raises:
        TraceError: The shares are those of another number of experts.
    """
    if isinstance(routing, str):
        first = torch.arange(choices)
        return (first if routing == "balanced" else first % width) % experts
    if len(routing) != experts:
        raise TraceError(
            f"the routing has {len(routing)} shares, and the model {experts} experts", hint=_HINT
        )
    tokens = choices // width
    quotas = _share_out(choices, tokens, routing)
    chosen = torch.repeat_interleave(torch.arange(experts), torch.tensor(quotas))
    # Down the columns, so that no token chooses an expert twice.
    return chosen.view(width, tokens).t().flatten()


def _share_out(choices: int, most: int, shares: Sequence[float]) -> list[int]:
    """Rounds to quotas of at most a choice of each token; others get what is left over."""
    quotas = [min(int(share * choices), most) for share in shares]
    ranked = sorted(range(len(shares)), key=lambda at: -shares[at])
    left = choices - sum(quotas)
    while left:
        wanted = [at for at in ranked if shares[at] and quotas[at] < most]
        # Where no expert that is wanted has room, the others are filled one after the other.
        for at in wanted or [next(at for at in ranked if quotas[at] < most)]:
            share = max(int(shares[at] * left), 1) if wanted else left
            given = min(most - quotas[at], share, left)
            quotas[at] += given
            left -= given
    return quotas
