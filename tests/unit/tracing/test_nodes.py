"""Nodes: their names, origins and arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from running import Runs
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import fxmem
from fxmem.analysis import Analysis
from fxmem.graph import Node, Phase
from fxmem.tracing.modules import is_leaf


def build(function: Callable[..., Any]) -> Any:
    """Makes a model of a function, with a few modules to call."""
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    return Runs(function, linear=nn.Linear(4, 4), act=nn.ReLU(), block=block)


def analyse(function: Callable[..., Any], *args: Any, **settings: Any) -> Analysis:
    return fxmem.analyze(build(function), args or ("3x4",), device="cpu", **settings)


def forward_nodes(analysis: Analysis) -> list[Node]:
    return [node for node in analysis.nodes if node.phase is Phase.FORWARD]


def names(analysis: Analysis) -> list[str]:
    return [node.name for node in forward_nodes(analysis)]


def find(analysis: Analysis, name: str) -> Node:
    return next(node for node in analysis.nodes if node.name == name)


def test_leaf_modules_functions_and_methods_are_nodes() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return torch.sin(m.act(m.linear(x))).mul(2)

    analysis = analyse(forward)
    assert [(n.name, n.op, n.target) for n in forward_nodes(analysis)] == [
        ("args_0", "placeholder", "args_0"),
        ("linear", "call_module", "Linear"),
        ("act", "call_module", "ReLU"),
        ("sin", "call_function", "sin"),
        ("mul", "call_method", "mul"),
    ]


def test_names_count_occurrences_and_carry_the_module_around() -> None:
    analysis = analyse(lambda m, x: m.block(m.block(x + 1) + 1) - m.linear(m.linear(x)))
    assert names(analysis)[1:] == [
        "add", "block.0", "block.1", "add_1", "block.0_1", "block.1_1", "linear", "linear_1", "sub",
    ]  # fmt: skip


def test_edges_lead_to_the_nodes_whose_results_are_taken() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        return torch.cat([right, m.linear(x)[:, :2], left])

    analysis = analyse(forward)
    at = {node.name: node.index for node in analysis.nodes}
    assert find(analysis, "cat").inputs == (at["chunk"], at["getitem"])
    assert find(analysis, "getitem").inputs == (at["linear"],)


def test_a_node_has_the_line_of_the_user_that_made_it() -> None:
    @torch.enable_grad()  # a wrapper, whose lines are not the user's
    def forward(m: Any, x: Tensor) -> Tensor:
        def nested(y: Tensor) -> Tensor:
            return y.exp()  # in a nested function

        y = m.block(x)  # through torch's Sequential
        return nested(
            y * 2  # over several lines
        )

    analysis = analyse(forward)
    for name, text in [
        ("block.1", "through torch's"),
        ("exp", "in a nested"),
        ("mul", "over several lines"),
    ]:
        source = find(analysis, name).source
        assert source is not None
        lines, start = inspect.getsourcelines(inspect.unwrap(forward))
        line = start + next(i for i, line in enumerate(lines) if text in line)
        assert (source.file, source.line) == (__file__, line)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * 2
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, y = ctx.saved_tensors
        return grads[0] * 2 + x * y * 0


def test_an_autograd_function_is_one_node_and_its_backward_belongs_to_it() -> None:
    analysis = analyse(lambda m, x: Double.apply(m.linear(x)).sin())
    node = find(analysis, "Double")
    assert names(analysis)[1:] == ["linear", "Double", "sin"]
    operations = [o for o in analysis.graph.operations if o.node == node.index]
    backward = [o.name for o in operations if o.phase is Phase.BACKWARD]
    assert backward.count("aten.mul.Tensor") == 3
    # The linear's output and its own, which sin saves too.
    assert node.saved_bytes == 2 * 3 * 4 * 4


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_region_is_one_node(reentrant: bool) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = checkpoint(m.block, m.linear(x), use_reentrant=reentrant)
        assert isinstance(y, Tensor)
        return y * 2

    analysis = analyse(forward)
    assert names(analysis)[1:] == ["linear", "checkpoint", "mul"]
    assert analysis.frontend == "record"
    node = find(analysis, "checkpoint")
    assert find(analysis, "mul").inputs == (node.index,)
    operations = [o for o in analysis.graph.operations if o.node == node.index]
    assert "aten.addmm.default" in [o.name for o in operations if o.phase is Phase.BACKWARD]
    assert node.saved_bytes == 3 * 4 * 4  # its input alone


def test_keyword_and_nested_inputs_are_placeholders() -> None:
    def forward(m: Any, pair: list[Tensor], *, extra: dict[str, Tensor]) -> Any:
        return m.linear(pair[0]) + pair[1] + extra["bias"]

    analysis = fxmem.analyze(
        build(forward),
        ([torch.ones(3, 4), torch.ones(3, 4)],),
        {"extra": {"bias": "4"}},
        device="cpu",
    )
    placeholders = [n.name for n in analysis.nodes if n.op == "placeholder"]
    assert placeholders == ["args_0", "extra"]
    assert analysis.input_bytes == (12 + 12 + 4) * 4


def test_views_and_in_place_results_have_no_output_bytes() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.linear(x)
        y[0] = 1
        return y.relu_().t().T.data

    analysis = analyse(forward, mode="infer")
    sizes = {node.name: node.output_bytes for node in forward_nodes(analysis)}
    assert sizes.pop("linear") == 48
    assert set(sizes) == {"args_0", "setitem", "relu_", "t", "T", "data"}
    assert not any(sizes.values())


def test_forward_hooks_are_part_of_the_module_they_hang_on() -> None:
    model = build(lambda m, x: m.block(x))
    model.linear.register_forward_hook(lambda module, args, output: output * 2)
    model.block.register_forward_hook(lambda module, args, output: output.sin())
    model.run = lambda m, x: m.block(m.linear(x))
    analysis = fxmem.analyze(model, ("3x4",), device="cpu")
    assert names(analysis)[1:] == ["linear", "block.0", "block.1", "block.sin"]


def read_patched() -> list[object]:
    checkpointing: Any = torch.utils.checkpoint
    return [
        nn.Module.__call__,
        torch.autograd.Function.__dict__["apply"],
        checkpointing._checkpoint_without_reentrant_generator,
        torch.get_rng_state,
        torch.overrides.has_torch_function,
        torch.cuda.synchronize,
    ]


def test_what_is_patched_is_restored_after_a_failure() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        raise KeyError("no such thing")

    before = read_patched()
    with pytest.raises(fxmem.TraceError, match=r"test_nodes.py:\d+: KeyError: 'no such thing'"):
        analyse(forward)
    assert read_patched() == before


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


class Block(nn.Module):
    """Has a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.linear = nn.Linear(8, 8)
        parametrize.register_parametrization(self, "weight", Doubled())
        parametrizations.weight_norm(self.linear)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x @ self.weight)


def test_a_parametrized_module_is_a_leaf_where_its_class_is_pytorch_s() -> None:
    block = Block()
    assert not is_leaf(block) and is_leaf(block.linear)
    analysis = fxmem.analyze(nn.Sequential(block), ("3x8",), device="cpu")
    names = {node.name for node in analysis.nodes}
    assert names > {"0.linear", "0.parametrizations.weight"}
