"""Which argument a result fits on."""

from __future__ import annotations

import pytest
import torch

from fxmem.recording.overwriting import find_overwritable

X = torch.zeros(2, 3)
LEAF = torch.zeros(2, 3, requires_grad=True)


@pytest.mark.parametrize(
    ("args", "kwargs", "positions"),
    [
        ((X, 1), {}, [0]),
        ((X, X.clone()), {}, [0, 1]),
        ((X, X.clone()), {"alpha": 2}, [0]),
        ((X, torch.zeros(3)), {}, [0]),
        ((torch.zeros(3), X), {}, [1]),
        ((X, torch.zeros(3, 2).t()), {}, [0]),  # its strides are others
        ((torch.zeros(2, 4)[:, :3], X), {}, [1]),  # not all of its storage
        ((torch.zeros(3).expand(2, 3), X), {}, [1]),
        ((X.int(), X), {}, [1]),
        ((LEAF, X), {}, [1]),
        ((LEAF * 1, X), {}, [0, 1]),
        (((LEAF * 1).view(2, 3), X), {}, [1]),
        ((X.view(2, 3), X.clone()), {}, [0, 1]),  # a view, but nothing is recorded
    ],
)
def test_fits(args: tuple[object, ...], kwargs: dict[str, int], positions: list[int]) -> None:
    result = torch.add(*args, **kwargs)  # type: ignore[arg-type]
    found = [*find_overwritable(args, kwargs, result)]
    assert [next(i for i, a in enumerate(args) if a is f) for f in found] == positions


def test_nothing_fits_where_the_result_is_no_plain_tensor() -> None:
    assert not [*find_overwritable((X,), {}, X.max(1))]
    assert not [*find_overwritable((X,), {}, X.to_sparse())]
    with torch.no_grad():
        assert [*find_overwritable((LEAF,), {}, LEAF + 1)]
