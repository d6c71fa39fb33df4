"""What bitsandbytes keeps for a parameter: bytes by its own formula."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxmem.recording.adam8bit import Adam8bit


@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [
        ((1000,), 2 * 4 * 1000),  # below 4096 elements: two states of float32
        ((64, 64), 2 * (4096 + 4 * 16)),  # two bytes an element, two scales a block of 256
        ((5000,), 2 * (5000 + 4 * 20)),  # 19.5 blocks
    ],
)
def test_states_are_as_large_as_by_formula(shape: tuple[int, ...], nbytes: int) -> None:
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.zeros(shape)
    optimizer = Adam8bit([parameter])
    optimizer.step()
    state = optimizer.state[parameter]
    own = [value for key, value in state.items() if not key.startswith("qmap")]
    assert sum(value.nbytes for value in own) == nbytes


def test_parameters_share_the_maps_of_codes() -> None:
    parameters = [nn.Parameter(torch.zeros(64, 64)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.zeros(64, 64)
    optimizer = Adam8bit(parameters)
    optimizer.step()
    first, second = (optimizer.state[parameter] for parameter in parameters)
    assert first["qmap1"] is second["qmap1"] and first["qmap1"].nbytes == 1024


def test_a_parameter_without_a_gradient_has_no_state() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = Adam8bit([parameter])
    optimizer.step()
    assert not optimizer.state
