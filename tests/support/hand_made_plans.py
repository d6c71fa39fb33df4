"""Plans and verifications made by hand, for the step of hand_made and others."""

from __future__ import annotations

from typing import Any

from fxmem.graph import SourceLocation
from fxmem.planning.plan import (
    DelPoint,
    InplaceChange,
    Limit,
    LimitKind,
    Plan,
    Segment,
)
from fxmem.verifying.verification import StepFigures, Verification

MIB = 1024**2


def at(line: int) -> SourceLocation:
    return SourceLocation("/home/me/nets/net.py", line, "forward")


def make_plan(**fields: object) -> Plan:
    """Two segments, one with another within; a change in place, a del point, moves, limits."""
    generator = "draws from a generator of its own, whose state is not restored"
    defaults: dict[str, object] = {
        "fingerprint": "0123456789abcdef",
        "baseline_peak_bytes": 30 * MIB,
        "peak_bytes": 21 * MIB,
        "reserved_bytes": 24 * MIB,
        "overhead": 0.25,
        "overhead_flops": 0.1,
        "segments": (
            Segment(
                *("fc1", "block.relu", 2),
                source=at(11),
                saving_bytes=5 * MIB,
                recompute_s=3e-4,
                recompute_flops=2_000_000,
                children=(Segment("fc1", "fc1", 1, fqn="fc1", source=at(11)),),
            ),
            Segment(
                "encoder.layers.11.attention.norm",
                "encoder.layers.11.attention.project_out",
                *(7, "encoder.layers.11.attention", at(13)),
                saving_bytes=-MIB,
                recompute_s=1e-4,
            ),
        ),
        "inplace": (InplaceChange("block.relu", "relu_", at(12), 4 * MIB),),
        "dels": (DelPoint("fc1", "hidden", "block.relu", at(12), 0),),
        "lower_bound_overhead": 0.2,
        "limits": (
            Limit("drop.rand", LimitKind.RECOMPUTE, generator, "drop", at(14)),
            Limit("choose", LimitKind.RECOMPUTE, "its sizes or values depend on the data"),
            Limit("drop.rand_1", LimitKind.RECOMPUTE, generator, "drop", at(14)),
            Limit("sigmoid", LimitKind.BEGIN, "mul_ changes its input in place"),
        ),
    }
    return Plan(**{**defaults, **fields})


def make_front(count: int = 3) -> tuple[Plan, ...]:
    """Plans that take 1 MiB less, and 4 % more time, each than the one before."""
    one = Segment("fc1", "fc1", 1, "fc1")
    return tuple(
        Plan(
            "0123456789abcdef",
            30 * MIB,
            (30 - index) * MIB - 512 * bool(index),
            overhead=0.04 * index,
            overhead_flops=0.0001 * index,
            segments=(one,) * index,
        )
        for index in range(count)
    )


def make_verification(**fields: Any) -> Verification:
    """Three steps that are equal bit for bit, in 20 MiB with the plan and 30 MiB without."""
    defaults = {
        "equal": True,
        "model": "nets/net.py:Net",
        "inputs": ("8x3:float32",),
        "mode": "train",
        "device": "cpu",
        "optimizer": "adam",
        "loss": None,
        "autocast": None,
        "seed": 7,
        "steps": 3,
        "compared": {"output": 1, "loss": 2, "gradient": 4, "optimizer state": 12},
        "differences": (),
        "baseline": StepFigures(30 << 20, 31 << 20, 0.25),
        "planned": StepFigures(20 << 20, None, 0.5),
    }
    return Verification(**{**defaults, **fields})
