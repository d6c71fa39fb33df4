"""Ways in which tokens go to the experts of a mixture, where their scores have no values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxmem.errors import TraceError
from fxmem.recording.size_hints import ROUTINGS, Routing


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
            f"the routing has {len(routing)} shares, and the model {experts} experts", hint=ROUTINGS
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
