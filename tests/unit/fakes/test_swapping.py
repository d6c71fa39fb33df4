"""Fakes in a model for a while: what they share, what they keep, and what comes back."""

from __future__ import annotations

import types
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.parametrizations import spectral_norm

from fxmem.errors import TraceError, UsageError
from fxmem.fakes.fake_mode import make_fake_mode
from fxmem.fakes.swapping import settle_lazy, swap_in_fakes


class Shared(nn.Module):
    """Tied parameters, views, and tensors that no module registered."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3, device=device)
        self.head = nn.Linear(3, 4, device=device)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.zeros(2, device=device), requires_grad=False)
        self.register_buffer("rows", self.head.weight.detach()[1:])
        self.register_buffer("none", None)
        self.plain = torch.ones(10, device=device)
        self.view = self.plain[2:4]
        self.listed = [nn.Parameter(torch.ones(3, device=device)), (self.plain, {"a": self.view})]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.listed[0])


def find_storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.fixture
def fake_mode() -> FakeTensorMode:
    return make_fake_mode()


@pytest.mark.parametrize("kind", ["cpu", "meta", "other fake", "same fake"])
def test_storages_are_shared_as_they_were(fake_mode: FakeTensorMode, kind: str) -> None:
    if "fake" in kind:
        with fake_mode if kind == "same fake" else make_fake_mode():
            model = Shared()
    else:
        model = Shared(kind)
    before = [model.head.weight, model.rows, model.plain, model.view, model.listed[0]]
    with swap_in_fakes(model, fake_mode, train=True), fake_mode:
        plain, held = model.listed[1]
        tensors = [*model.parameters(), *model.buffers(), model.plain, model.view, model.listed[0]]
        assert all(isinstance(t, FakeTensor) and t.fake_mode is fake_mode for t in tensors)
        assert {tensor.device for tensor in tensors} == {torch.device("cpu")}
        assert not {*map(id, tensors)} & {*map(id, before)}
        assert model.head.weight is model.embedding.weight
        assert (plain, held["a"]) == (model.plain, model.view)
        assert find_storage(model.view) == find_storage(model.plain)
        assert model.view.storage_offset() == 2
        assert find_storage(model.rows) == find_storage(model.head.weight)
        assert model.plain.untyped_storage().nbytes() == 40
        assert isinstance(model.listed[0], nn.Parameter)
        flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        assert flags == {"frozen": False, "embedding.weight": True, "head.bias": True}
        model(torch.ones(2, 3)).sum().backward()
        assert model.head.weight.grad.shape == (4, 3)
    after = [model.head.weight, model.rows, model.plain, model.view, model.listed[0]]
    assert [*map(id, after)] == [*map(id, before)]
    assert model.listed[1][1]["a"] is model.view


class Busy(nn.Module):
    """Changes what it holds in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.calls, self.kept, self.features = 0, [torch.ones(1)], {"last": None}
        self.layers[0].register_forward_hook(lambda m, x, y: self.features.update(last=y))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.kept.append(x)
        self.table = x
        del self.layers[1].eps
        return self.layers[0](x)


@pytest.mark.parametrize("fails", [False, True])
def test_the_users_model_is_as_it_was(fake_mode: FakeTensorMode, fails: bool) -> None:
    model = Busy().eval()
    weight, grad = model.layers[0].weight, torch.ones(2, 2)
    weight.grad, weight.tag = grad, "kept"
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        with swap_in_fakes(model, fake_mode, dtype="float16", train=True), fake_mode:
            assert model.training and model.layers[0].weight.tag == "kept"
            assert model.layers[0].weight.grad.dtype == torch.float16
            model(torch.ones(3, 2, dtype=torch.float16)).sum().backward()
            assert isinstance(model.features["last"], FakeTensor)
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert (model.calls, len(model.kept), model.features) == (0, 1, {"last": None})
    assert not hasattr(model, "table") and model.layers[1].eps == 1e-5
    assert not model.training and not model.layers[0].training
    assert model.layers[0].weight is weight and weight.grad is grad
    assert torch.equal(grad, torch.ones(2, 2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_a_step_replaces_can_go(fake_mode: FakeTensorMode) -> None:
    model: Any = nn.Linear(2, 2)
    kept = model.pyramid = [torch.ones(3)]  # as torchvision's RAFT
    first = kept[0]
    with swap_in_fakes(model, fake_mode, train=True) as (_, _, forget_replaced), fake_mode:
        fake = weakref.ref(kept[0])
        model.pyramid = [torch.ones(3)]
        forget_replaced()
        assert fake() is None and len(model.pyramid) == 1
    assert model.pyramid is kept and kept[0] is first


def test_a_cast_is_what_module_to_does(fake_mode: FakeTensorMode) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Shared())
    model.to(memory_format=torch.channels_last)
    with swap_in_fakes(model, fake_mode, dtype="bfloat16", train=True):
        fakes = [(n, t.dtype, t.stride()) for n, t in model.state_dict(keep_vars=True).items()]
        assert model[2].plain.dtype == torch.float32
    model.to(torch.bfloat16)
    reals = [(n, t.dtype, t.stride()) for n, t in model.state_dict(keep_vars=True).items()]
    assert fakes == reals


def test_a_dtype_that_is_not_floating_is_refused(fake_mode: FakeTensorMode) -> None:
    expected = r"a model cannot be cast to int64 \(float32, bfloat16, float16 or float64\)"
    with (
        pytest.raises(UsageError, match=expected),
        swap_in_fakes(nn.Linear(2, 2), fake_mode, dtype="int64", train=True),
    ):
        pass


def test_one_element_buffers_keep_their_values(fake_mode: FakeTensorMode) -> None:
    model = nn.BatchNorm1d(2, momentum=None)  # divides by the number of batches
    with swap_in_fakes(model, fake_mode, train=True), fake_mode:
        model(torch.ones(3, 2))
        assert model.num_batches_tracked.item() == 1
    assert model.num_batches_tracked.item() == 0


def test_lazy_parameters_become_fakes_with_their_shape(fake_mode: FakeTensorMode) -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2))
    kinds, given = [*map(type, model)], ["2x3x5x5:bf16"]
    with swap_in_fakes(model, fake_mode, given, dtype="bfloat16", train=True) as (args, *_):
        settle_lazy(model, args, {}, fake_mode, "bfloat16")
        shapes = [tuple(parameter.shape) for parameter in model.parameters()]
        assert shapes == [(4, 3, 3, 3), *[(4,)] * 3, (2, 36), (2,)]
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert model[1].running_mean.shape == (4,)
        with fake_mode:
            model(*args).sum().backward()
        assert all(isinstance(parameter.grad, FakeTensor) for parameter in model.parameters())
    assert nn.parameter.is_lazy(model[0].weight)
    assert [*map(type, model)] == kinds


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_normalised_weights_are_computed_again(fake_mode: FakeTensorMode) -> None:
    layers = [nn.utils.weight_norm(nn.Linear(2, 2)), nn.utils.spectral_norm(nn.Linear(2, 2))]
    model = nn.Sequential(*layers, spectral_norm(nn.Linear(2, 2)))
    model(torch.ones(1, 2)).sum().backward()
    with swap_in_fakes(model, fake_mode, train=True), fake_mode:
        model(torch.ones(1, 2)).sum().backward()
        assert all(p.grad is not None for name, p in model.named_parameters())
    assert not model[0].weight.is_leaf and not isinstance(model[0].weight, FakeTensor)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripts_and_quantized_tensors_are_refused(fake_mode: FakeTensorMode) -> None:
    quantized = nn.Module()
    with pytest.warns(match="quantize"):
        codes = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    quantized.register_buffer("codes", codes)
    scripted = torch.jit.script(nn.Linear(2, 2))
    for model, message in (
        (quantized, "'codes': a quantized tensor has no fake copy (analyse the float model)"),
        (
            scripted,
            "the model is TorchScript, which does not run on fake tensors "
            "(pass the module that was scripted)",
        ),
    ):
        with pytest.raises(TraceError) as caught, swap_in_fakes(model, fake_mode, train=True):
            pass
        assert str(caught.value) == message


def test_an_optimizer_in_backward_steps_the_fakes(fake_mode: FakeTensorMode) -> None:
    """As in PyTorch's tutorial of that name."""
    model, optimizers = nn.Linear(2, 2), {}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        optimizers[parameter] = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        parameter.register_post_accumulate_grad_hook(update)
    model(torch.ones(1, 2)).sum().backward()
    weight, before = model.weight, model.weight.detach().clone()
    states = [dict(optimizer.state) for optimizer in optimizers.values()]
    with swap_in_fakes(model, fake_mode, train=True), fake_mode:
        assert set(optimizers) == set(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad is None
        state = optimizers[model.weight].state[model.weight]
        assert isinstance(state["momentum_buffer"], FakeTensor)
    assert model.weight is weight and weight.grad is None and torch.equal(weight, before)
    assert [dict(optimizer.state) for optimizer in optimizers.values()] == states
    assert set(optimizers) == set(model.parameters())


def test_objects_among_the_inputs_hold_fakes_too(fake_mode: FakeTensorMode) -> None:
    x = torch.ones(3, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda x: setattr(x, "grad", None))
    cache, model = types.SimpleNamespace(kept=[x, torch.ones(2)]), nn.Linear(3, 3)

    def compare(output: Tensor, scale: Tensor = model.weight) -> Tensor:
        return output * scale - x

    given = {"args": [x, [cache]], "readers": (compare,)}
    with swap_in_fakes(model, fake_mode, train=True, **given) as (args, *_), fake_mode:
        assert args[1][0] is cache and cache.kept[0] is args[0]
        assert all(isinstance(tensor, FakeTensor) for tensor in cache.kept)
        compare(args[0]).sum().backward()
        assert args[0].grad is None and model.weight.grad is not None
        cache.kept.append(args[0])
    assert len(cache.kept) == 2 and cache.kept[0] is x
    assert type(compare(x)) is Tensor


class Scaled(nn.Parameter):
    """A parameter with a method and a say in what is computed from it."""

    seen: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})

    def scale(self) -> int:
        return 2


def test_a_subclass_stays_one(fake_mode: FakeTensorMode) -> None:
    model = nn.Linear(2, 2)
    model.weight = Scaled(model.weight.detach())
    with swap_in_fakes(model, fake_mode, train=True), fake_mode:
        assert isinstance(model.weight, Scaled) and isinstance(model.weight, FakeTensor)
        assert model.weight.scale() == 2
        model(torch.ones(1, 2)).sum().backward()
        assert nn.functional.linear in Scaled.seen
        assert type(model.weight.grad) is FakeTensor
