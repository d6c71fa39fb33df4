"""The operator cache returns what the fake mode returns, the second time too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxmem.fakes.fake_mode import make_fake_mode
from fxmem.fakes.operator_cache import OperatorCache

Program = Callable[[torch.Tensor], Any]

PROGRAMS: dict[str, Program] = {
    "new": lambda x: x + 1,
    "several new": lambda x: torch.nn.functional.layer_norm(x, (6,)),
    "a list of views": lambda x: x.chunk(2),
    "views that say not that they are": lambda x: torch.ops.aten.unsafe_split.Tensor(x, 2),
    "a list joined": lambda x: torch.cat([x, x[1:]]),
    "view": lambda x: x[1:, 2:].t(),
    "views at other places": lambda x: [x[i, 1:].unsqueeze(0) for i in range(4)],
    "counted from the beginning": lambda x: [x[i:].as_strided((2,), (1,)) for i in range(2)],
    "view that says not that it is one": lambda x: torch.ops.aten._unsafe_view.default(x, [24]),
    "overwritten": lambda x: x.clone().mul_(2).relu_(),
    "overwritten through a view": lambda x: x.clone()[1:].add_(x[1:]),
    "changed in shape": lambda x: x.clone().t_(),
    "resized": lambda x: x.clone().resize_(2, 2),
    "numbers of other types": lambda x: (x + 1, x + 1.5, x + True),
    "other dtypes": lambda x: (x.half() + 1, x.double() + 1, x.int() + 1.0),
    "empty": lambda x: x[:0] * 2,
    "expanded": lambda x: x[:1].expand(3, 6) + 1,
    "channels last": lambda x: x.view(1, 2, 2, 6).to(memory_format=torch.channels_last) * 2,
    "nothing in some place": lambda x: torch.ops.aten.native_batch_norm(
        x, None, None, None, None, True, 0.1, 1e-5
    ),
    "complex": lambda x: torch.view_as_complex(x.view(4, 3, 2)).conj() * 2,
    "scalars": lambda x: torch.tensor(2.0) * 3,
}


class _Cached(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.cache = OperatorCache()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.cache.run(func, args, kwargs or {})


def describe(result: Any, x: torch.Tensor) -> list[object]:
    """Metadata of the tensors in a result, and which of them share memory with the input."""
    tensors = result if isinstance(result, (tuple, list)) else [result]
    return [
        (
            type(t),
            tuple(t.shape),
            t.stride(),
            t.storage_offset(),
            t.dtype,
            t.device,
            t.untyped_storage().nbytes(),
            t.untyped_storage()._cdata == x.untyped_storage()._cdata,
            t._is_view(),
            t._version,
        )
        for t in tensors
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_cached_results_are_those_of_the_fake_mode(name: str) -> None:
    program = PROGRAMS[name]
    mode, cached = make_fake_mode(), _Cached()
    with mode:
        x = torch.empty(4, 6)
        expected = describe(program(x), x)
        for _ in range(3):
            with cached:
                result = program(x)
            assert describe(result, x) == expected


def test_a_result_of_new_memory_is_new_each_time() -> None:
    with make_fake_mode(), _Cached():
        x = torch.empty(3)
        first, second = x * 2, x * 2
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
