"""Models and inputs that cannot be analysed are refused before anything runs."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.loading.inputs import suggest_shape


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        return self.linear(x) * scale


class Two(Net):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return self.linear(ids) * mask


class Empty(nn.Module):
    pass


class Forgets(nn.Module):
    def __init__(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return x


class Anything(Net):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return self.linear(args[0])


class Spread(Net):
    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:  # type: ignore[override]
        return self.linear(x)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Net, "the model is the class Net, not an instance of it (pass Net(...))"),
        (
            {"weight": torch.ones(2)},
            "the model must be an nn.Module, got dict "
            "(pass a module, or name one: 'path/to/file.py:Model')",
        ),
        (
            Forgets(),
            "Forgets.__init__ does not call the one of nn.Module "
            "(begin it with super().__init__())",
        ),
        (
            nn.ModuleList([nn.Linear(4, 4)]),
            "ModuleList has no method forward "
            "(define forward(self, ...) in it; of a ModuleList, call the modules one by one)",
        ),
    ],
)
def test_what_is_no_model(model: Any, message: str) -> None:
    with pytest.raises(fxmem.UsageError) as caught:
        fxmem.analyze(model, ("3x4",))
    assert str(caught.value) == message


def test_a_forward_that_an_instance_got_is_one() -> None:
    model = Empty()
    model.forward = lambda x: x * 2  # type: ignore[method-assign]
    assert fxmem.analyze(model, ("3x4",), mode="infer").peak_bytes > 0


ONE_EACH = "one input for each argument without a default"
NET = "Net.forward(x, mask=None, *, scale=1.0)"


@pytest.mark.parametrize(
    ("model", "args", "kwargs", "message"),
    [
        (Net(), (), {}, f"missing input 'x' of {NET} ({ONE_EACH})"),
        (
            Two(),
            (),
            {"mask": "3x4"},
            f"missing input 'ids' of Two.forward(ids, mask) ({ONE_EACH})",
        ),
        (Net(), ("3x4", None, 2.0), {}, f"3 inputs are too many for {NET} ({ONE_EACH})"),
        (
            Net(),
            (8, 3, 224, 224),
            {},
            f"4 inputs are too many for {NET} (a shape is one text: '8x3x224x224')",
        ),
        (
            Net(),
            ("3x4",),
            {"maks": "3x4"},
            f"there is no argument 'maks' in {NET} (did you mean mask?)",
        ),
        (Net(), ("3x4",), {"y": 1}, f"there is no argument 'y' in {NET} (it takes x, mask, scale)"),
        (
            Net(),
            ("3x4",),
            {"x": "3x4"},
            f"'x' is given by position and by name to {NET} (each input once)",
        ),
        (
            Two(),
            {"ids": "3x4", "mask": "3x4"},
            {},
            "inputs by name were passed by position to Two.forward(ids, mask) "
            "(pass the dict as kwargs)",
        ),
        (Spread(), (), {}, f"missing input 'x' of Spread.forward(x, *rest) ({ONE_EACH})"),
        (
            Net(),
            (numpy.ones((3, 4)),),
            {},
            "an input is a NumPy array (pass torch.from_numpy(array), or '8x3:float32')",
        ),
    ],
)
def test_inputs_that_do_not_fit(model: nn.Module, args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(fxmem.UsageError) as caught:
        fxmem.analyze(model, args, kwargs)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("model", "args", "kwargs"),
    [
        (Anything(), ("3x4", 1, 2), {"anything": "3x4"}),
        (Spread(), ("3x4", "3x4", "3x4"), {}),
        (Net(), "3x4", {"scale": 2.0}),
        (Net(), torch.ones(3, 4), None),
        (Net(), fxmem.TensorSpec((3, 4)), None),
        (Net(), ["3x4"], None),
    ],
)
def test_inputs_that_fit(model: nn.Module, args: Any, kwargs: Any) -> None:
    assert fxmem.analyze(model, args, kwargs).peak_bytes > 0


def test_sizes_that_were_passed_as_inputs_are_noticed_where_forward_takes_them() -> None:
    with pytest.raises(fxmem.TraceError) as caught:
        fxmem.analyze(Two(), (3, 4))
    assert caught.value.hint == "a shape is one text: '3x4'"
    with pytest.raises(fxmem.TraceError) as caught:
        fxmem.analyze(Net(), ([3, 4],))
    assert caught.value.hint == "a shape is one text: '3x4'"


@pytest.mark.parametrize("inputs", [(), ("3x4:float32", "4"), (1.5,), (None, 3)])
def test_other_inputs_are_no_sizes(inputs: tuple[object, ...]) -> None:
    assert suggest_shape(inputs) == ""
