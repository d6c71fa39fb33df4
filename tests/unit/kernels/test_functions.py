"""Replacing torch functions, and what the CPU replaces besides recurrent layers."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from measuring.side_by_side import compare, run_fake, run_real
from running import Call, Runs
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import fxmem
from fxmem.kernels.functions import lower_functions
from fxmem.kernels.registry import Backend

F = nn.functional


@pytest.fixture
def counted() -> tuple[Backend, list[Tensor]]:
    """A target that counts calls of ``torch.sin``."""
    target, seen = Backend("test"), []

    @target.function(torch.sin)
    def sin(input: Tensor) -> Tensor:
        seen.append(input)
        return torch.cos(input)

    return target, seen


Counted = tuple[Backend, list[Tensor]]


class TestLowering:
    def test_modes_entered_later_see_the_call_first(self, counted: Counted) -> None:
        target, seen = counted
        called = []

        class Watch(TorchFunctionMode):
            def __torch_function__(
                self, func: Any, types: Any, args: Any, kwargs: Any = None
            ) -> Any:
                called.append(func)
                return func(*args, **(kwargs or {}))

        x = torch.zeros(1)
        with lower_functions(target), Watch():
            assert torch.sin(x) == 1
        assert torch.sin in called
        assert torch.sin(x) == 0 and len(seen) == 1

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_in_recomputation(self, counted: Counted, reentrant: bool) -> None:
        x = torch.zeros(1, requires_grad=True)
        with lower_functions(counted[0]):
            y = checkpoint(lambda x: torch.sin(x) * x, x, use_reentrant=reentrant)
            assert len(counted[1]) == 1
            y.backward()
        assert len(counted[1]) == 2

    def test_in_hooks_run_by_autograd_grad(self, counted: Counted) -> None:
        x = torch.zeros(1, requires_grad=True)
        y = x * 1
        y.register_hook(lambda grad: torch.sin(grad * 0))
        with lower_functions(counted[0]):
            assert torch.autograd.grad(y, x) == (1,)

    def test_recursion_and_defaults_of_opened_functions(self) -> None:
        with lower_functions(Backend("test")):
            assert torch.equal(torch.einsum("ij->ji", torch.eye(2)), torch.eye(2))
            assert F.softmax(torch.zeros(2), dim=0).tolist() == [0.5, 0.5]
            pooled, indices = F.max_pool2d(torch.ones(1, 2, 2), 2, return_indices=True)
            assert pooled.item() == 1 and indices.item() == 0
            with pytest.raises(RuntimeError, match="shape"):
                F.linear(torch.zeros(2, 3), torch.zeros(2, 4))

    def test_a_failure_restores_everything(self, counted: Counted) -> None:
        before = torch.overrides.has_torch_function
        with pytest.raises(ZeroDivisionError), lower_functions(counted[0]):
            raise ZeroDivisionError
        assert torch.overrides.has_torch_function is before
        assert torch.sin(torch.zeros(1)) == 0


def _count_adds(model: nn.Module, *args: Tensor) -> Counter[str]:
    """Additions in a real inference that nobody watches, by the profiler."""
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        model.eval()(*args)
    result = profiler.profiler
    assert result is not None and result.kineto_results is not None
    names = (event.name() for event in result.kineto_results.events())
    return Counter(name for name in names if name in ("aten::add", "aten::add_"))


_x, _weight, _bias = torch.randn(2, 5, 8), torch.randn(8, 8), torch.randn(8)
_heads, _mask = torch.randn(2, 2, 5, 4), torch.randn(5, 5, requires_grad=True)
_attend = F.scaled_dot_product_attention

IN_PLACE: dict[str, tuple[Any, ...]] = {
    "linear": (Call(lambda x, w, b: F.linear(x.transpose(0, 1), w, b)), _x, _weight, _bias),
    "dense linear": (Call(F.linear), _x, _weight, _bias),
    "linear with a strided bias": (Call(F.linear), _x, _weight, _weight[:, 0]),
    "linear with an expanded bias": (Call(F.linear), _x, _weight, _bias[:1].expand(8)),
    "own sum": (Call(lambda x, w, b: x @ w + b), _x, _weight, _bias),
    "masked attention": (Call(lambda q, m: _attend(q, q, q, m)), _heads, _mask),
    "multi-head attention": (Call(lambda x: _attention(x.transpose(0, 1))[0]), _x),
    "gru": (nn.GRU(8, 8, batch_first=True), _x),
    "rnn": (nn.RNN(8, 8, batch_first=True), _x),
    "lstm": (nn.LSTM(8, 8, batch_first=True).double(), _x.double()),
}


def _attention(x: Tensor) -> tuple[Tensor, Tensor | None]:
    projection = _weight.repeat(3, 1)
    return F.multi_head_attention_forward(
        x, x, x, 8, 2, projection, _bias.repeat(3), None, None, False, 0.0, _weight, _bias,
        need_weights=False,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", IN_PLACE)
def test_adds_in_place_where_nobody_watching_does(name: str) -> None:
    model, *args = IN_PLACE[name]
    real = _count_adds(model, *args)
    fake = Counter(run_fake(model, *args, mode="infer").operators)
    assert fake["aten.add_.Tensor"] == real["aten::add_"]
    if name != "multi-head attention":  # its kernel calls add too
        assert fake["aten.add.Tensor"] == real["aten::add"]


@pytest.mark.parametrize("name", ["linear", "masked attention", "gru"])
def test_adding_in_place_changes_no_other_operator(name: str) -> None:
    model, *args = IN_PLACE[name]
    leaves = [x.detach().clone().requires_grad_() for x in args]
    fake = run_fake(model, *leaves)
    real = run_real(model, *leaves)
    pairs = set(zip(real.operators, fake.operators, strict=True))
    assert {(a, b) for a, b in pairs if a != b} == {("aten.add.Tensor", "aten.add_.Tensor")}
    assert fake.saved == real.saved
    assert fake.peak_bytes <= real.peak_bytes


def test_attention_takes_its_fast_path() -> None:
    attention = nn.MultiheadAttention(16, 4, batch_first=True).eval().requires_grad_(False)
    for need_weights in (False, True):
        take = functools.partial(attention, need_weights=need_weights)
        model = Runs(lambda _, x, take=take: take(x, x, x)[0], attention=attention)
        with torch.no_grad():
            operators = compare(model.eval(), torch.randn(3, 5, 16), mode="infer")
        assert operators == ["aten._native_multi_head_attention.default"]


def test_encoder_takes_its_fast_path_in_inference() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
    fast = ["aten._transformer_encoder_layer_fwd.default"] * 2
    assert run_fake(encoder, torch.randn(3, 5, 16), mode="infer").operators == fast
    assert run_fake(encoder, torch.randn(3, 5, 16), mode="eval").operators != fast


@pytest.mark.parametrize(
    ("mode", "masked", "options", "noted"),
    [
        ("infer", True, {}, True),
        ("infer", False, {}, False),
        ("infer", True, {"enable_nested_tensor": False}, False),
        ("train", True, {}, False),
    ],
)
def test_nested_tensors_that_are_taken_as_padded_are_noted(
    mode: str, masked: bool, options: dict[str, Any], noted: bool
) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, **options)
    padding = torch.zeros(3, 5, dtype=torch.bool) if masked else None
    inputs = ("3x5x16",), {"src_key_padding_mask": padding}
    notes = fxmem.analyze(model, *inputs, mode=mode, device="cpu").setup.notes
    note = (
        "nn.TransformerEncoder makes nested tensors of what its padding mask leaves, whose sizes "
        "and memory depend on values: taken as padded, as enable_nested_tensor=False has them."
    )
    assert notes == ((note,) if noted else ())


@pytest.mark.parametrize(
    ("sizes", "options"),
    [((2, 4, 9), {"ceil_mode": True}), ((4, 9), {"stride": 1, "padding": 1})],
)
def test_max_pool1d_finds_no_indices_in_inference(sizes: Any, options: dict[str, Any]) -> None:
    model, x = nn.MaxPool1d(2, **options), torch.randn(sizes)
    trace = run_fake(model, x, mode="infer")
    with torch.no_grad():
        expected = model(x)
    assert trace.operators == ["aten.new_empty.default"]
    assert trace.results[0][1][0][0] == tuple(expected.shape)
    assert trace.peak_bytes == expected.nbytes
    compare(model, x.requires_grad_())
