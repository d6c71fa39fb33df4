from __future__ import annotations

from collections import OrderedDict, namedtuple

import torch

from fxmem.recording.trainers import cast_to_float32

Pair = namedtuple("Pair", ["left", "right"])


def test_only_halves_are_cast_and_containers_stay_what_they_are() -> None:
    half, whole = torch.zeros(2, dtype=torch.float16), torch.zeros(2, dtype=torch.float64)
    cast = cast_to_float32(OrderedDict(a=[half, whole], b=Pair(half, None), c="text"))
    assert type(cast) is OrderedDict
    assert type(cast["b"]) is Pair
    assert cast["a"][0].dtype == cast["b"].left.dtype == torch.float32
    assert cast["a"][1] is whole
    assert (cast["b"].right, cast["c"]) == (None, "text")
