"""Values of which some elements are known, against all that the unknown ones may be."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fxmem.fakes.values import attach_value, find_known
from fxmem.recording.bounds import find_bounds
from fxmem.recording.constants import see_result
from fxmem.recording.size_hints import SizeHints

LENGTH = 2
KNOWN = (
    torch.tensor([False, True]),
    torch.tensor([3, -2]),
    torch.tensor([1, 0], dtype=torch.uint8),
    torch.tensor([0.5, 1.0]),
)
OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "or": lambda a, b: a.bool() | b.bool(),
    "and": lambda a, b: a.bool() & b.bool(),
    "and of numbers": lambda a, b: a.long() & b.bool(),
    "xor of numbers": lambda a, b: a.long() ^ b.long(),
    "not": lambda a, b: ~a.bool(),
    "logical_not": lambda a, b: a.logical_not(),
    "logical_xor": torch.logical_xor,
    "where": lambda a, b: torch.where(a.bool(), a, b),
    "where not": lambda a, b: torch.where(b.bool(), 2, a),
    "masked_fill": lambda a, b: a.masked_fill(b.bool(), 1),
    "add": lambda a, b: a.int() + b,
    "subtract": lambda a, b: 1 - a.long(),
    "multiply": torch.mul,
    "bytes": lambda a, b: a.bool().byte() - b.bool().byte(),
    "divide": lambda a, b: a / b,
    "remainder": lambda a, b: a % 3,
    "float": lambda a, b: a.float() * b,
    "equal": torch.eq,
    "equal to one": lambda a, b: a == 1,
    "differ": torch.ne,
    "at most": torch.le,
    "above": lambda a, b: a > b,
    "maximum": torch.maximum,
    "clamp": lambda a, b: a.clamp(max=1),
    "abs": lambda a, b: (a.int() - b.int()).abs(),
    "sum": lambda a, b: a.sum().expand(LENGTH),
    "cumsum": lambda a, b: a.cumsum(0),
    "sort": lambda a, b: a.sort().values,
    "max": lambda a, b: a.max().expand(LENGTH),
    "max of dim": lambda a, b: torch.stack([a, a]).max(0).indices,
    "min": lambda a, b: a.min().expand(LENGTH).clone(),
    "any": lambda a, b: a.any().expand(LENGTH),
    "all": lambda a, b: torch.stack([a.bool(), b.bool()]).all(0),
    "cat": lambda a, b: torch.cat([a, b])[1 : 1 + LENGTH],
    "index": lambda a, b: a[b.bool().long()],
    "index_select": lambda a, b: a.index_select(0, b.bool().int()),
    "gather": lambda a, b: a.gather(0, b.bool().long()),
    "flip": lambda a, b: a.flip(0),
    "in place": lambda a, b: a.clone().add_(b.to(a.dtype)),
    "in place through a view": lambda a, b: _fill_view(a, b),
    "argmax": lambda a, b: a.int().argmax().expand(LENGTH),
    "isin": torch.isin,
}


def _fill_view(a: Tensor, b: Tensor) -> Tensor:
    whole = a | b if a.dtype == b.dtype == torch.bool else a.clone()
    whole[1:].logical_not_()
    whole[:1].copy_(b[:1])
    return whole


class _Sees(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        see_result(func, args, kwargs or {}, result, SizeHints())
        return result


Program = list[tuple[str, int, int]]
steps = st.tuples(st.sampled_from([*OPERATIONS]), st.integers(0, 5), st.integers(0, 5))
programs = st.lists(steps, min_size=1, max_size=6)


def compute(program: Program, inputs: list[Tensor]) -> list[Tensor]:
    for name, one, other in program:
        a, b = inputs[-1 - one % len(inputs)], inputs[-1 - other % len(inputs)]
        try:
            inputs = [*inputs, OPERATIONS[name](a, b)]
        except RuntimeError:  # of dtypes that do not go with each other
            continue
    return inputs


def compute_bounds(program: Program) -> list[Any]:
    reals = [tensor.clone() for tensor in KNOWN]
    with FakeTensorMode() as mode, _Sees():  # type: ignore[no-untyped-call]
        known = [mode.from_tensor(tensor) for tensor in KNOWN]
        for fake, real in zip(known, reals, strict=True):
            attach_value(fake, real)
        unknown = [torch.empty(LENGTH, dtype=torch.bool) for _ in range(2)]
        found = compute(program, [*known, *unknown])
        return [find_bounds(tensor) for tensor in found]


@settings(max_examples=25, deadline=None)
@given(programs)
@example([("or", 0, 5), ("in place through a view", 0, 6)])
@example([("sum", 0, 0), ("equal to one", 0, 0)])
@example([("sum", 0, 0), ("subtract", 0, 0), ("any", 0, 0)])
@example([("sum", 0, 0), ("abs", 0, 5)])
@example([("add", 0, 1), ("and of numbers", 0, 6)])
@example([("float", 0, 2), ("remainder", 0, 0)])
def test_whatever_the_unknown_is_values_are_within_their_bounds(program: Program) -> None:
    bounds = compute_bounds(program)
    for bits in itertools.product((False, True), repeat=2 * LENGTH):
        unknown = torch.tensor(bits).view(2, LENGTH).unbind()
        values = compute(program, [*(tensor.clone() for tensor in KNOWN), *unknown])
        for value, bound in zip(values, bounds, strict=True):
            if bound is not None:
                least, most = bound
                assert value.dtype == least.dtype and value.shape == least.shape
                inside = (least <= value) & (value <= most)
                assert bool((inside | (value.isnan() & least.isnan())).all())


ABSORB: dict[str, tuple[Callable[[Tensor], Tensor], Any]] = {
    "or": (lambda x: x | torch.ones_like(x), [True] * 3),
    "and": (lambda x: torch.logical_and(x, torch.zeros_like(x)), [False] * 3),
    "times 0": (lambda x: x * 0, [0] * 3),
    "where": (lambda x: torch.where(x, 5, 5), [5] * 3),
    "any": (lambda x: torch.cat([x, torch.ones_like(x)]).any(), True),
    "all": (lambda x: torch.stack([x, torch.zeros_like(x)]).all(), False),
    "count": (lambda x: x.sum() <= 3, True),
    "greatest": (lambda x: (x.long() & ~torch.ones_like(x)).max() == 0, True),
}


def test_what_decides_whatever_the_rest_is_is_known() -> None:
    with FakeTensorMode(), _Sees():  # type: ignore[no-untyped-call]
        results = [absorb(torch.empty(3, dtype=torch.bool)) for absorb, _ in ABSORB.values()]
    for name, result in zip(ABSORB, results, strict=True):
        known = find_known(result)
        assert known is not None and known.real.tolist() == ABSORB[name][1], name
