"""Planned models within what training wraps around a model: the same bits as without a plan."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from leanest import apply_leanest
from planned_models import Attention, Dense, Residual
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import fxmem

Pair = tuple[nn.Module, Any, Tensor]
MODELS = {
    "residual": (Residual, torch.randn(4, 3, 16, 16)),
    "attention": (Attention, torch.randn(4, 8, 16)),
    "dense": (Dense, torch.randn(4, 3, 16, 16)),
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> Pair:
    torch.manual_seed(0)
    make, x = MODELS[request.param]
    model = make().train()
    return model, apply_leanest(model, (x,)), x


def sum_output(output: Any) -> Tensor:
    values = output.values() if isinstance(output, dict) else [output]
    return sum((value.float().square().sum() for value in values), torch.zeros(()))


def gather_state(model: nn.Module) -> dict[str, Tensor]:
    """All that a step leaves behind."""
    gradients = {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **gradients}
    copies = {name: tensor.detach().clone() for name, tensor in state.items()}
    return {**copies, "random state": torch.get_rng_state()}


def compare(pair: Pair, train: Callable[[nn.Module, Tensor], Any]) -> None:
    """Trains both from the same state, and compares all that is left."""
    model, planned, x = pair
    start = copy.deepcopy(model.state_dict())
    left: list[dict[str, Tensor]] = []
    before = planned.plan_calls
    for run in (model, planned):
        model.load_state_dict(start)
        model.zero_grad()
        torch.manual_seed(1)
        train(run, x)
        left.append(gather_state(model))
    model.load_state_dict(start)
    expected, found = left
    assert planned.plan_calls > before
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_gradients_accumulate_over_batches_of_other_sizes(
    pair: Pair,
) -> None:
    def train(run: nn.Module, x: Tensor) -> None:
        for size in (4, 4, 3, 2):
            sum_output(run(x[:size])).backward()

    compare(pair, train)


def test_a_scaler_with_autocast(pair: Pair) -> None:
    def train(run: nn.Module, x: Tensor) -> None:
        optimizer = torch.optim.Adam(run.parameters())
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = sum_output(run(x))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    model, _, x = pair
    compare((model, apply_leanest(model, (x,), autocast="bf16"), x), train)


def test_parameters_given_by_a_functional_call_are_refused(
    pair: tuple[nn.Module, nn.Module, Tensor],
) -> None:
    """They are gone when backward comes, as under every checkpoint; there the gradients differ."""
    model, planned, x = pair
    others = {name: torch.rand_like(p, requires_grad=True) for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    loss = sum_output(torch.func.functional_call(planned, {**others, **buffers}, (x,)))
    with pytest.raises(fxmem.UsageError, match="cannot be recomputed in backward"):
        loss.backward()


def test_gradients_of_gradients(pair: Pair) -> None:
    def train(run: nn.Module, x: Tensor) -> None:
        parameters = [p for p in run.parameters() if p.requires_grad]
        loss = sum_output(run(x))
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        sum(g.square().sum() for g in gradients).backward()  # type: ignore[union-attr]

    compare(pair, train)


def double_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 2


def test_hooks_on_parameters_and_results(pair: Pair) -> None:
    def train(run: nn.Module, x: Tensor) -> None:
        handles = []
        for parameter in run.parameters():
            handles.append(parameter.register_hook(lambda g: g * 1.5))
            handles.append(parameter.register_post_accumulate_grad_hook(double_gradient))
        output = run(x)
        tensor = output if isinstance(output, Tensor) else output["hidden"]
        tensor.register_hook(lambda g: g + 1)
        sum_output(output).backward()
        for handle in handles:
            handle.remove()

    compare(pair, train)


Transformed = Callable[[nn.Module, Tensor], Any]
TRANSFORMS: dict[str, Transformed] = {
    "grad": lambda run, x: torch.func.grad(lambda x: run(x).sum())(x),
    "gradients of each sample": lambda run, x: torch.func.vmap(
        torch.func.grad(lambda p, x: torch.func.functional_call(run, p, (x[None],)).sum()),
        (None, 0),
    )({name: p.detach() for name, p in run.named_parameters()}, x),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("style", ["graph", "modules"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_under_a_transform_the_model_s_own_code_runs(name: str, style: str) -> None:
    blocks = [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2)]
    model, x = nn.Sequential(*blocks), torch.randn(64, 8)
    planned = apply_leanest(model, (x,), style=style)
    expected = TRANSFORMS[name](model, x)
    with pytest.warns(fxmem.FxmemWarning, match=r"torch.func's transforms do not allow"):
        found = TRANSFORMS[name](planned, x)
    leaves = zip(tree_leaves(expected), tree_leaves(found), strict=True)
    assert all(torch.equal(one, other) for one, other in leaves)


def train_distributed(rank: int, store: str, results: Any) -> None:
    """One of two processes; what each ends with goes to a queue."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    states = {
        (is_planned, static_graph): train_wrapped(rank, is_planned, static_graph)
        for is_planned in (False, True)
        for static_graph in (False, True)
    }
    gc.collect()  # a wrapper that outlives the group waits in its destructor, at times for good
    dist.destroy_process_group()
    differ = [
        name
        for static_graph in (False, True)
        for name, expected in states[False, static_graph].items()
        if not torch.equal(expected, states[True, static_graph][name])
    ]
    results.put((rank, differ))


def train_wrapped(rank: int, is_planned: bool, static_graph: bool) -> dict[str, Tensor]:
    make, x = MODELS["residual"]
    torch.manual_seed(0)
    model: nn.Module = make().train()
    if is_planned:
        model = apply_leanest(model, (x,))
    wrapped = DistributedDataParallel(model, static_graph=static_graph)
    optimizer = torch.optim.Adam(wrapped.parameters())
    torch.manual_seed(10 + rank)
    for _ in range(3):
        optimizer.zero_grad()
        sum_output(wrapped(torch.randn_like(x))).backward()
        optimizer.step()
    return gather_state(model)


def test_distributed_data_parallel(tmp_path: Path) -> None:
    results = mp.get_context("spawn").SimpleQueue()
    # An error in a process, or a signal that ends one, is raised here.
    mp.spawn(train_distributed, (str(tmp_path / "store"), results), nprocs=2)
    assert sorted(results.get() for _ in range(2)) == [(0, []), (1, [])]
