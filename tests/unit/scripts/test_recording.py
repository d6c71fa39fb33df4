"""Code in a ``with`` statement, recorded as a script is."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem import TraceError, UsageError


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 8))


def draw_batches() -> Iterator[Tensor]:
    while True:
        yield torch.randn(32, 64, device="cuda")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("is_made_before", [True, False])
def test_a_step_takes_what_it_takes_in_an_analysis(is_made_before: bool) -> None:
    model = make_model()
    before = torch.optim.AdamW(model.parameters())
    with fxmem.record(gpu="h100", steps=2) as recording:
        model.cuda()
        optimizer = before if is_made_before else torch.optim.AdamW(model.parameters())
        x = torch.randn(32, 64, device="cuda")
        while True:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(recording.steps) == 2
    analysis = fxmem.analyze(
        make_model(), "32x64", gpu="h100", optimizer="adamw", loss=lambda out: out.square().mean()
    )
    # An analysis holds the output of the step, of 32 x 8 elements, to its end.
    assert abs(recording.steps[1].peak_bytes - analysis.peak_bytes) <= 32 * 8 * 4
    assert recording.peak.nbytes == recording.steps[1].peak_bytes


def test_modules_and_optimizers_are_what_they_were() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    momenta = [state["momentum_buffer"].clone() for state in optimizer.state.values()]
    with fxmem.record() as recording:
        model.cuda()
        for x in draw_batches():
            train(model, optimizer, x)
    assert len(recording.steps) == 3
    assert all(torch.equal(kept[name], tensor) for name, tensor in model.state_dict().items())
    again = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert all(map(torch.equal, momenta, again))
    assert all(each.grad is not None for each in model.parameters())  # as before


def test_an_error_leaves_the_block_and_torch_as_it_was() -> None:
    model = make_model()
    with pytest.raises(ZeroDivisionError), fxmem.record():
        model.cuda()
        raise ZeroDivisionError
    assert not torch.cuda.is_available()
    assert model(torch.ones(4, 64)).shape == (4, 8)


def test_phases_lie_before_and_in_an_evaluation() -> None:
    """What runs between a step and an evaluation is a window that is not reported."""
    with fxmem.record(steps=2) as recording:
        model = make_model().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x in draw_batches():
            train(model, optimizer, x)
            with recording.phase("between"):
                for _ in range(9):
                    torch.empty(1 << 20, device="cuda").zero_()
            with recording.phase("evaluate"), torch.no_grad():
                model.eval()(torch.randn(1 << 16, 64, device="cuda"))
            model.train()
    between, evaluated = recording.phases[:2]
    assert (between.name, between.step, evaluated.name, evaluated.step) == (
        *("between", None),
        *("evaluate", None),
    )
    before = recording.steps[0].peak_bytes
    assert 4 << 20 < between.peak_bytes < before + (5 << 20)
    assert recording.run.evaluation is not None
    assert evaluated.peak_bytes == recording.run.evaluation.peak_bytes > 2 * (1 << 16) * 256 * 4


def test_phases_have_peaks_and_lines() -> None:
    with fxmem.record() as recording:
        with recording.phase("load"):
            model = make_model().cuda().double()
        optimizer = torch.optim.SGD(model.float().parameters(), 0.1)
        for x in draw_batches():
            with recording.phase("train"):
                train(model, optimizer, x)
            with recording.phase("evaluate"), torch.no_grad():
                model(torch.randn(1 << 16, 64, device="cuda"))
    loaded, trained, evaluated = recording.phases[:3]
    assert (loaded.name, trained.name, evaluated.name) == ("load", "train", "evaluate")
    assert (loaded.step, trained.step, evaluated.step) == (None, 0, 1)
    assert recording.run.loading is not None
    # Each weight in float32 is freed once there is one in float64.
    weights = sum(each.numel() * 4 for each in make_model().parameters())
    assert 2 * weights < loaded.peak_bytes < 3 * weights
    assert evaluated.peak_bytes > 2 * (1 << 16) * 256 * 4 > trained.peak_bytes
    assert evaluated.source is not None
    assert evaluated.source.function == "test_phases_have_peaks_and_lines"


def test_code_without_a_step_is_one_and_nothing_is_an_error() -> None:
    with fxmem.record() as recording:
        torch.ones(1 << 20, device="cuda")
    assert [step.peak_bytes for step in recording.steps] == [4 << 20]
    with fxmem.record() as recording:
        pass
    with pytest.raises(TraceError, match="ended without an operation on cuda"):
        str(recording)
    with pytest.raises(UsageError, match="must be 1 or more"), fxmem.record(steps=0):
        pass


def test_analyses_in_threads_wait_for_each_other() -> None:
    def measure(width: int) -> int:
        return fxmem.analyze(nn.Linear(width, 64), f"8x{width}").peak_bytes

    widths, found = range(64, 576, 64), dict[int, int]()
    threads = [
        threading.Thread(target=lambda width=width: found.update({width: measure(width)}))
        for width in widths
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {width: measure(width) for width in widths}
    assert nn.Linear(2, 2)(torch.ones(1, 2)).shape == (1, 2)


def test_an_analysis_in_recorded_code_is_no_part_of_it() -> None:
    def record(analyzes: bool) -> tuple[list[int], list[tuple[int, int]]]:
        found = []
        with fxmem.record(gpu="h100", steps=2) as recording:
            model = make_model().cuda()
            optimizer = torch.optim.AdamW(model.parameters())
            for x in draw_batches():
                loss = model(x).square().mean()
                loss.backward()
                if analyzes:
                    within = fxmem.analyze(make_model(), "32x64", optimizer="adam")
                    found.append((within.peak_bytes, within.saved_bytes))
                optimizer.step()
                optimizer.zero_grad()
        return [step.peak_bytes for step in recording.steps], found

    alone = fxmem.analyze(make_model(), "32x64", optimizer="adam")
    steps, found = record(True)
    assert steps == record(False)[0]
    assert set(found) == {(alone.peak_bytes, alone.saved_bytes)}


def test_a_module_that_the_code_lets_go_of_is_freed() -> None:
    with fxmem.record(gpu="a100-40gb"):
        for _ in range(2):
            model = nn.Linear(4096, 4096).cuda()
            model(torch.ones(8, 4096, device="cuda")).sum().backward()
            del model
            assert torch.cuda.memory_allocated() < 32 << 20  # cuBLAS keeps workspaces


def test_bytes_that_a_script_makes_on_the_cpu_have_values() -> None:
    with fxmem.record(device="cpu", steps=1):
        mask = torch.zeros(8, dtype=torch.uint8)
        mask[2:5] = 1
        assert mask.numpy().sum() == 3
        nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()


def test_what_a_module_of_fakes_had_before_a_cast_is_freed() -> None:
    with fxmem.record(gpu="a100-40gb"):
        with torch.device("cuda"):
            model = nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16)
            model.register_buffer("base", torch.ones(1024, 1024, dtype=torch.bfloat16))
            model.weight.grad = torch.ones_like(model.weight)
        model.float()
        assert torch.cuda.memory_allocated() == 3 * 4 * 1024**2  # weight, gradient, buffer


def test_parameters_of_modules_on_no_device_are_made_again_by_their_class() -> None:
    """As ``init_on_device`` of accelerate and transformers 4 does, where Lightning is on a GPU."""
    with fxmem.record(), torch.device("cuda"):
        layer = nn.Linear(4, 3)
        for name, parameter in [*layer._parameters.items()]:
            assert parameter is not None
            remade = type(parameter)(parameter.to("meta"), **vars(parameter), requires_grad=True)
            layer._parameters[name] = remade
            assert isinstance(remade, nn.Parameter) and remade.requires_grad
            assert remade.is_meta
        assert layer.to_empty(device="cuda").weight.is_cuda


class Labelled(torch.Tensor):
    """As ``MetaTensor`` of MONAI."""

    @staticmethod
    def __new__(cls, data: Any) -> Labelled:  # type: ignore[misc]
        made: Labelled = torch.as_tensor(data).as_subclass(cls)  # type: ignore[attr-defined]
        return made


class Stacked:
    """As ``TensorDict`` of tensordict, which is no tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Stacked:
        return cls(func(args[0].tensor))


class Listing(nn.Module):
    """As ``Learner`` of dragen1860/MAML-Pytorch, whose ``parameters`` takes no arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.vars = nn.ParameterList([nn.Parameter(torch.ones(4, 4))])

    def parameters(self) -> nn.ParameterList:  # type: ignore[override]
        return self.vars


class Late(nn.Module):
    """As ``SingleTaskGP`` of BoTorch, which calls another module before it has its own."""

    def __init__(self, scale: nn.Module, x: Tensor) -> None:
        scaled = scale(x)
        super().__init__()
        self.scaled = scaled


class Trainer:
    """As ``NeuralNet`` of skorch, whose ``_modules`` are names."""

    def __init__(self) -> None:
        self._modules = ["net"]
        self.net = nn.Linear(4, 4)

    def fit(self) -> None:
        self.net.cuda()
        self.net(torch.ones(2, 4, device="cuda")).sum().backward()


def test_classes_that_differ_from_torch_s_own() -> None:
    with fxmem.record():
        Trainer().fit()
        assert Late(nn.Linear(4, 4).cuda(), torch.ones(2, 4).cuda()).scaled.is_cuda
        listing = Listing().cuda()
        x = Labelled(torch.ones(8, 4, device="cuda"))
        made = Labelled(torch.empty_like(Stacked(x)).tensor)  # type: ignore[call-overload]
        assert isinstance(x * 2, Labelled) and isinstance(made, Labelled) and made.is_cuda
        (x @ listing.vars[0]).sum().backward()
        assert listing.vars[0].grad is not None


def test_data_parallel_on_several_gpus_is_refused() -> None:
    with (
        pytest.raises(TraceError, match="DataParallel on 2 GPUs is not modelled") as raised,
        fxmem.record(),
    ):
        nn.DataParallel(nn.Linear(4, 4), device_ids=[0, 1]).cuda()(torch.ones(2, 4).cuda())
    assert raised.value.hint == "device_ids=[0], with its part of the batch"


def test_operators_within_torch_func_have_nodes() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU())

    def compute_loss(x: Tensor) -> Tensor:
        return model(x).square().sum()  # type: ignore[no-any-return]

    with fxmem.record(steps=1) as recording:
        model.cuda()
        torch.func.vmap(torch.func.grad(compute_loss))(torch.ones(8, 16).cuda()).sum()
    graph = recording.steps[0].graph
    products = [each for each in graph.operations if "mm" in each.name]
    assert products and products[0].node is not None


class Copying(torch.Tensor):
    """As ``TensorBase`` of fastai, which gives a result the attributes of an argument."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Copying):
            result.__dict__ = copy.copy(args[0].__dict__)
        return result


def test_attributes_of_a_subclass_go_with_its_results() -> None:
    target = torch.ones(4).as_subclass(Copying)  # type: ignore[attr-defined]
    target.label = "cat"
    with fxmem.record():
        moved = target.to("cuda") * 2
        assert moved.label == "cat" and moved.is_cuda and isinstance(moved, Copying)


class Sharpness(torch.optim.Optimizer):
    """As SAM of davda54/sam, around another optimizer; its own ``step`` need not be called."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:
        self.base.step()


@pytest.mark.parametrize("calls_own_step", [False, True])
def test_an_optimizer_around_another_makes_no_steps_of_its_own(calls_own_step: bool) -> None:
    rounds = 0
    with fxmem.record(steps=3) as recording:
        model = make_model().cuda()
        optimizer = Sharpness(model.parameters())
        for x in draw_batches():
            rounds += 1
            model(x).square().mean().backward()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            (optimizer if calls_own_step else optimizer.base).step()
            optimizer.zero_grad()
    assert (len(recording.steps), rounds) == (3, 4)  # left before a fourth step


class Cycle:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.itself = tensor, self


def test_tensors_in_reference_cycles_are_freed_sooner_or_later() -> None:
    """As a callback that a sampler keeps; Python's collector runs where it wants to."""
    with fxmem.record(steps=4) as recording:
        model = make_model().cuda()
        Cycle(torch.ones(2048, 2048, device="cuda"))  # lost while the script loads
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x in draw_batches():
            cycle = Cycle(torch.ones(512, 512, device="cuda"))
            train(model, optimizer, x)
            del cycle
    peaks = [step.peak_bytes for step in recording.steps]
    assert peaks[1] == peaks[2] == peaks[3] < 30 << 20  # cuBLAS' 16 MiB, and not the lost 16


@pytest.mark.parametrize("hold", [list, tuple])
def test_functions_get_the_proxies_that_a_list_holds(hold: Any) -> None:
    """As e3nn and opt_einsum_fx (MACE) write modules, by ``torch.einsum`` of ``torch.fx.Proxy``."""
    with fxmem.record(steps=1) as recording:
        graph = torch.fx.Graph()
        tracer = torch.fx.proxy.GraphAppendingTracer(graph)
        a, b = (torch.fx.Proxy(graph.placeholder(name), tracer) for name in "ab")
        graph.output(torch.einsum("ij,jk->ik", hold([a, b])).node)
        multiply = torch.fx.GraphModule(nn.Module(), graph)
        weight = torch.ones(8, 8, device="cuda", requires_grad=True)
        multiply(weight, weight).sum().backward()
    names = [operation.name for operation in recording.steps[0].graph.operations]
    assert any("mm" in name for name in names)


def test_the_class_of_a_tensor_makes_no_parameter_of_another() -> None:
    with fxmem.record():
        x = torch.ones(4, device="cuda")
        made = type(x)(x * 2)
        assert made.is_cuda and not isinstance(made, nn.Parameter)
        copied = type(x.as_subclass(Copying))(x)  # type: ignore[attr-defined]
        assert isinstance(copied, Copying)
