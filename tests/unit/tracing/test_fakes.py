"""Copies on fake tensors: what they share, what they keep, what they leave alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fxmem.tracing.lazy import settle_lazy
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fxmem.errors import TraceError, UsageError
from fxmem.specs import TensorSpec
from fxmem.tracing.fakes import (
    describe_inputs,
    make_fake_inputs,
    make_fake_mode,
    make_fake_model,
    read_leaf,
)


class Shared(nn.Module):
    """Tied parameters, views, and tensors that no module registered."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3, device=device)
        self.head = nn.Linear(3, 4, device=device)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.zeros(2, device=device), requires_grad=False)
        self.register_buffer("rows", self.head.weight.detach()[1:])
        self.register_buffer("ids", torch.zeros(5, dtype=torch.int64, device=device))
        self.plain = torch.ones(10, device=device)
        self.view = self.plain[2:4]
        self.listed = [nn.Parameter(torch.ones(3, device=device)), self.plain]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.listed[0])


def find_storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.fixture
def fake_mode() -> FakeTensorMode:
    return make_fake_mode()


@pytest.mark.parametrize("kind", ["cpu", "meta", "other fake", "same fake"])
@pytest.mark.parametrize("active", [False, True])
def test_storages_are_shared_as_they_were(
    fake_mode: FakeTensorMode, kind: str, active: bool
) -> None:
    if "fake" in kind:
        with fake_mode if kind == "same fake" else make_fake_mode():
            model = Shared()
    else:
        model = Shared(kind)
    if active:
        with fake_mode:
            fake = make_fake_model(model, fake_mode, train=True)
    else:
        fake = make_fake_model(model, fake_mode, train=True)

    tensors = [*fake.parameters(), *fake.buffers(), fake.plain, fake.view, *fake.listed]
    assert all(isinstance(t, FakeTensor) and t.fake_mode is fake_mode for t in tensors)
    assert {tensor.device for tensor in tensors} == {torch.device("cpu")}
    assert fake.head.weight is fake.embedding.weight
    assert fake.listed[1] is fake.plain
    assert find_storage(fake.view) == find_storage(fake.plain)
    assert fake.view.storage_offset() == 2
    assert find_storage(fake.rows) == find_storage(fake.head.weight)
    assert len({find_storage(tensor) for tensor in tensors}) == 6
    assert fake.plain.untyped_storage().nbytes() == 40
    assert isinstance(fake.listed[0], nn.Parameter)
    flags = {name: parameter.requires_grad for name, parameter in fake.named_parameters()}
    assert flags == {"frozen": False, "embedding.weight": True, "head.bias": True}
    with fake_mode:
        fake(torch.ones(2, 3)).sum().backward()
    assert fake.head.weight.grad.shape == (4, 3)


def test_the_users_model_is_left_alone(fake_mode: FakeTensorMode) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].weight.grad = torch.ones(2, 2)
    model[0].weight.tag = "kept"
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fake = make_fake_model(model, fake_mode, dtype="float16", train=False)
    with fake_mode:
        fake.train()(torch.ones(3, 2, dtype=torch.float16)).sum().backward()
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(2, 2))
    assert fake[0].weight.tag == "kept"


def test_gradients_are_copied_and_modes_set(fake_mode: FakeTensorMode) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[0].weight.grad = torch.ones(2, 2)
    grad = make_fake_model(model, fake_mode, dtype="bfloat16", train=True)[0].weight.grad
    assert isinstance(grad, FakeTensor)
    assert (grad.shape, grad.dtype) == ((2, 2), torch.bfloat16)
    assert not make_fake_model(model, fake_mode, train=False)[1].training


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_a_cast_is_what_module_to_does(fake_mode: FakeTensorMode, dtype: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Shared())
    model.to(memory_format=torch.channels_last)
    fake = make_fake_model(model, fake_mode, dtype=dtype, train=True)
    model.to(getattr(torch, dtype))
    for (name, real), copy in zip(
        model.state_dict(keep_vars=True).items(),
        fake.state_dict(keep_vars=True).values(),
        strict=True,
    ):
        assert (name, real.dtype, real.stride()) == (name, copy.dtype, copy.stride())
    assert fake[2].head.weight is fake[2].embedding.weight
    assert fake[2].plain.dtype == torch.float32


def test_a_dtype_that_is_not_floating_is_refused(fake_mode: FakeTensorMode) -> None:
    with pytest.raises(UsageError) as caught:
        make_fake_model(nn.Linear(2, 2), fake_mode, dtype="int64", train=True)
    assert str(caught.value) == (
        "a model cannot be cast to int64 (float32, bfloat16, float16 or float64)"
    )


def test_one_element_buffers_keep_their_values(fake_mode: FakeTensorMode) -> None:
    model = nn.BatchNorm1d(2, momentum=None)  # divides by the number of batches
    fake = make_fake_model(model, fake_mode, train=True)
    with fake_mode:
        fake(torch.ones(3, 2))
        fake(torch.ones(3, 2))
        assert fake.num_batches_tracked.item() == 2
    assert model.num_batches_tracked.item() == 0


@pytest.mark.parametrize("active", [False, True])
def test_lazy_parameters_become_fakes_with_their_shape(
    fake_mode: FakeTensorMode, active: bool
) -> None:
    model = nn.Sequential(
        nn.LazyConv2d(4, 3),
        nn.LazyBatchNorm2d(),
        nn.LazyInstanceNorm2d(),
        nn.Flatten(),
        nn.LazyLinear(2),
    )
    with fake_mode if active else contextlib.nullcontext():
        fake = make_fake_model(model, fake_mode, dtype="bfloat16", train=True)
    args, _ = make_fake_inputs(["2x3x5x5:bf16"], {}, fake_mode)
    settle_lazy(fake, args, {}, fake_mode)
    shapes = [tuple(parameter.shape) for parameter in fake.parameters()]
    assert shapes == [(4, 3, 3, 3), *[(4,)] * 5, (2, 36), (2,)]
    assert {parameter.dtype for parameter in fake.parameters()} == {torch.bfloat16}
    means = [fake.get_buffer(f"{index}.running_mean") for index in (1, 2)]
    assert all(isinstance(mean, FakeTensor) and mean.shape == (4,) for mean in means)
    with fake_mode:
        fake(*args).sum().backward()
    assert all(isinstance(parameter.grad, FakeTensor) for parameter in fake.parameters())
    assert nn.parameter.is_lazy(model[0].weight)


def test_weight_norm_is_copied_without_its_history(fake_mode: FakeTensorMode) -> None:
    model = nn.Module()
    model.weight = torch.nn.Parameter(torch.ones(3)) * 2
    fake = make_fake_model(model, fake_mode, train=True)
    assert fake.weight.is_leaf
    assert fake.weight.requires_grad


def test_bound_hooks_follow_the_copy(fake_mode: FakeTensorMode) -> None:
    class Counting(nn.Linear):
        calls = 0

        def count(self, *_: object) -> None:
            self.calls += 1

    model = Counting(2, 2)
    model.register_forward_hook(model.count)
    fake = make_fake_model(model, fake_mode, train=True)
    with fake_mode:
        fake(torch.ones(1, 2))
    assert (model.calls, fake.calls) == (0, 1)


class Streaming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.stream = (number for number in range(3))


def test_an_attribute_that_cannot_be_copied_is_named(fake_mode: FakeTensorMode) -> None:
    with pytest.raises(TraceError) as caught:
        make_fake_model(nn.Sequential(Streaming()), fake_mode, train=True)
    assert str(caught.value) == (
        "the model cannot be copied: attribute '0.stream' of Streaming: TypeError: cannot pickle "
        "'generator' object (pass the class or a factory instead of an instance, "
        "e.g. 'module:Model')"
    )


def test_a_model_built_on_fakes_need_not_be_copied(fake_mode: FakeTensorMode) -> None:
    with fake_mode:
        model = Streaming()
    fake = make_fake_model(model, fake_mode, dtype="bfloat16", train=False)
    assert fake is model
    assert fake.linear.weight.dtype == torch.bfloat16
    assert not fake.training


def test_quantized_tensors_are_refused(fake_mode: FakeTensorMode) -> None:
    model = nn.Module()
    with pytest.warns(match="quantize"):
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    model.register_buffer("codes", quantized)
    with pytest.raises(TraceError) as caught:
        make_fake_model(model, fake_mode, train=True)
    assert str(caught.value) == (
        "'codes': a quantized tensor has no fake copy (analyse the float model)"
    )


def test_inputs_keep_their_structure(fake_mode: FakeTensorMode) -> None:
    twice = torch.ones(2, 3, requires_grad=True)
    args, kwargs = make_fake_inputs(
        [twice, [twice, None, 3], {"a": "1x4:int64", "how": "mean"}, True],
        {"spec": TensorSpec((2,), requires_grad=True), "meta": torch.empty(2, device="meta")},
        fake_mode,
        dtype="bfloat16",
    )
    assert args[0] is args[1][0]
    assert (args[1][1:], args[2]["how"], args[3]) == ([None, 3], "mean", True)
    assert args[0].requires_grad
    assert args[0].dtype == kwargs["spec"].dtype == torch.bfloat16
    assert args[2]["a"].dtype == torch.int64
    assert kwargs["spec"].requires_grad
    tensors: list[Any] = [args[0], args[2]["a"], kwargs["spec"], kwargs["meta"]]
    assert all(t.fake_mode is fake_mode and t.device.type == "cpu" for t in tensors)
    assert not isinstance(twice, FakeTensor)


def test_inputs_keep_strides_and_sharing_but_not_the_data_set(fake_mode: FakeTensorMode) -> None:
    data = torch.ones(1000, 8)
    image = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    (first, second, fake_image, wide), _ = make_fake_inputs(
        [data[10:20], data[15:30], image, torch.ones(1).expand(7)], {}, fake_mode
    )
    assert find_storage(first) == find_storage(second)
    assert first.untyped_storage().nbytes() == 20 * 8 * 4
    assert (first.storage_offset(), second.storage_offset()) == (0, 40)
    assert fake_image.is_contiguous(memory_format=torch.channels_last)
    assert wide.stride() == (0,)
    assert wide.untyped_storage().nbytes() == 4


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_spec_has_a_memory_format(dtype: str | None, fake_mode: FakeTensorMode) -> None:
    inputs, _ = make_fake_inputs(
        ["2x3x4x4:channels_last", "2x3x4x4x4:channels_last_3d", "2x3x4x4"],
        {},
        fake_mode,
        dtype=dtype,
    )
    assert inputs[0].is_contiguous(memory_format=torch.channels_last)
    assert inputs[1].is_contiguous(memory_format=torch.channels_last_3d)
    assert inputs[2].is_contiguous()


def test_a_text_that_starts_like_a_spec_must_be_one(fake_mode: FakeTensorMode) -> None:
    with pytest.raises(UsageError) as caught:
        make_fake_inputs(["8y3"], {}, fake_mode)
    assert str(caught.value).startswith("bad shape '8y3'")


def test_inputs_are_described_as_they_are_written() -> None:
    texts = describe_inputs(
        [
            None,
            "2x3",
            [torch.ones(3), True],
            {"how": "mean"},
            object(),
            "2x3x4x4:channels_last",
            torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
            torch.ones(2, 3, 4, 4, 4).to(memory_format=torch.channels_last_3d),
            torch.ones(2, 3, 4, 4).transpose(2, 3),
        ],
        {"ids": torch.zeros(1, dtype=torch.int64), "s": torch.tensor(1.0)},
    )
    assert texts == (
        "None",
        "2x3:float32",
        "[2][0]=3:float32",
        "[2][1]=True",
        "[3]['how']='mean'",
        "object",
        "2x3x4x4:float32:channels_last",
        "2x3x4x4:float32:channels_last",
        "2x3x4x4x4:float32:channels_last_3d",
        "2x3x4x4:float32",
        "ids=1:int64",
        "s=scalar:float32",
    )


def test_a_generator_is_copied_with_its_state(fake_mode: FakeTensorMode) -> None:
    model = nn.Linear(2, 2)
    model.generator = torch.Generator().manual_seed(7)
    fake = make_fake_model(model, fake_mode, train=True)
    assert fake.generator is not model.generator
    assert fake.generator.initial_seed() == 7


def make_compiled_in_place() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].compile()
    return model


COMPILED = (
    "is compiled: what a compiler allocates is not analysed "
    "(pass the module as it was before torch.compile)"
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.compile(nn.Linear(2, 2)), f"the model {COMPILED}"),
        (make_compiled_in_place, f"'0' {COMPILED}"),
        (
            lambda: torch.jit.script(nn.Linear(2, 2)),
            "the model is TorchScript, which does not run on fake tensors "
            "(pass the module that was scripted)",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_models_are_refused(
    fake_mode: FakeTensorMode, make: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(TraceError) as caught:
        make_fake_model(make(), fake_mode, train=True)
    assert str(caught.value) == message


class Cache:
    """An object that comes with the inputs and is changed by the model."""

    def __init__(self, *kept: Tensor) -> None:
        self.kept = [*kept]


def test_objects_among_the_inputs_are_copied(fake_mode: FakeTensorMode) -> None:
    x, lock = torch.ones(3), threading.Lock()
    cache, stream = Cache(x, torch.ones(2)), (number for number in range(3))
    args, kwargs = make_fake_inputs([x, [cache, stream]], {"lock": lock}, fake_mode)
    fake = args[1][0]
    assert fake.kept[0] is args[0]
    assert all(isinstance(tensor, FakeTensor) for tensor in fake.kept)
    assert cache.kept[0] is x and type(cache.kept[1]) is Tensor
    assert (args[1][1], kwargs["lock"]) == (stream, lock)


class Forgetful(nn.Module):
    """Leaves out of a pickle what it runs with."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Any = torch.ones(5)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "table": None}


def test_what_a_pickle_leaves_out_is_copied(fake_mode: FakeTensorMode) -> None:
    fake = make_fake_model(nn.Sequential(Forgetful()), fake_mode, train=True)
    assert isinstance(fake[0].table, FakeTensor)


def test_a_view_that_the_model_keeps_is_one_of_the_copy(fake_mode: FakeTensorMode) -> None:
    model = nn.Linear(3, 2)
    model.turned = model.weight.t()
    model.register_buffer("row", model.weight[1])
    fake = make_fake_model(model, fake_mode, train=True)
    with fake_mode:
        (fake.turned.sum() + fake.row.sum()).backward()
    assert fake.weight.grad.shape == (2, 3)
    assert fake.turned.grad_fn.name() == "TBackward0"
    assert fake.row._base is fake.weight
    assert model.weight.grad is None


def test_a_text_that_starts_with_a_size_is_no_other_argument() -> None:
    with pytest.raises(UsageError, match="bad shape '-1x3'"):
        read_leaf("-1x3")
    assert read_leaf("-x") == "-x"
