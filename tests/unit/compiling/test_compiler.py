"""Code under torch.compile, which PyTorch's own compiler lowers for a GPU that is not there."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fxmem
from fxmem import Category, TraceError, UsageError
from fxmem.scripts.recording import Recording
from fxmem.scripts.script_run import Progress
from fxmem.units import format_bytes

pytestmark = [
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:Skipping serialization"),  # 2.6, of its own settings
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
MIB = 1 << 20


class Chain(nn.Module):
    """Takes 64 MiB for each of its intermediate results, if each is kept."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4096))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x * self.scale)
        if self.breaks:
            torch._dynamo.graph_break()
        return (torch.sin(x) + 1).square().mean()


def record_steps(compile: bool = True, breaks: bool = False, **options: Any) -> Recording:
    with fxmem.record(gpu="h100", steps=3, compile=compile) as recording:
        model = Chain(breaks).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run: Callable[[Tensor], Tensor] = torch.compile(model, **options)
        x = torch.randn(4096, 4096, device="cuda")
        for _ in range(4):
            run(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    return recording


@pytest.fixture(scope="module")
def compiled() -> Recording:
    return record_steps()


def test_a_fused_step_holds_less_and_every_step_the_same(compiled: Recording) -> None:
    eager = record_steps(compile=False)
    # Eager mode keeps tanh, sin and the sum for backward; the compiler recomputes them.
    assert eager.peak.nbytes > compiled.peak.nbytes + 128 * MIB
    assert len({step.peak_bytes for step in compiled.steps}) == 1
    assert "torch.compile was left out: the figures are of eager mode." in eager.notes
    assert compiled.notes == ("torch.compile: 1 graph.",)
    assert compiled.steps[-1].setup.compile == "compiled"
    assert eager.steps[-1].setup.compile == "left out"


def test_code_between_two_graphs_is_recorded_and_the_break_is_named(compiled: Recording) -> None:
    broken = record_steps(breaks=True)
    line = Chain.forward.__code__.co_firstlineno + 3
    assert f"torch.compile: 2 graphs, broken off at test_compiler.py:{line}." in broken.notes
    assert broken.peak.nbytes >= compiled.peak.nbytes + 64 * MIB  # tanh's result is handed over


class Loop(nn.Module):
    """Runs eagerly, since it breaks off in a loop, and has each layer compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.activate(x) @ torch.ones(64, 64, device="cuda") + self.scale
            torch._dynamo.graph_break()
        return x.mean()

    def activate(self, x: Tensor) -> Tensor:
        return torch.sin(torch.tanh(x))


def test_of_a_frame_that_is_left_alone_the_code_is_compiled_and_not_what_records_it() -> None:
    with fxmem.record(gpu="h100", steps=1, compile=True) as recording:
        model = Loop().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.compile(model)(torch.ones(8, 64, device="cuda")).backward()
        optimizer.step()
    # The input of the first layer has no gradient, the others' have.
    assert recording.notes == ("torch.compile: 2 graphs, 1 recompilation.",)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_backends_that_compile_nothing_run_as_they_are(backend: str) -> None:
    recording = record_steps(backend=backend)
    assert len({step.peak_bytes for step in recording.steps[1:]}) == 1
    assert not recording.notes


def test_a_compiled_optimizer_ends_its_steps() -> None:
    with fxmem.record(gpu="h100", steps=2, compile=True) as recording:
        model = nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        step = torch.compile(optimizer.step)
        for _ in range(3):
            model(torch.randn(8, 64, device="cuda")).square().mean().backward()
            step()
            optimizer.zero_grad()
    assert len(recording.steps) == 2


def test_dynamo_is_left_as_it_was(compiled: Recording) -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    rules: Any = torch._dynamo.trace_rules
    assert not any("fxmem" in folder for folder in rules.SKIP_DIRS)
    doubled: Any = torch.compile(double, backend="eager")
    assert torch.equal(doubled(torch.ones(2)), torch.full((2,), 2.0))
    assert record_steps().peak.nbytes == compiled.peak.nbytes
    compilers: Any = torch._inductor.async_compile.AsyncCompile
    assert not compilers.process_pool.cache_info().currsize


def test_rules_that_dynamo_makes_meanwhile_are_torch_s_own(tmp_path: Path) -> None:
    rules, names = torch._dynamo.trace_rules, ("synchronize", "set_device", "current_device")
    before = [rules.lookup(getattr(torch.cuda, name)) for name in names]
    lines = ("import torch", "def make():", "    return torch.compile(torch.nn.Linear(4, 4))")
    (tmp_path / "net.py").write_text("\n".join(lines))
    rules.clear_lru_cache()  # as a process group does
    fxmem.analyze(f"{tmp_path / 'net.py'}:make", ["2x4"], device="cuda", compile=False)
    assert [rules.lookup(getattr(torch.cuda, name)) for name in names] == before


@pytest.mark.skipif(
    importlib.util.find_spec("torch._dynamo.graph_bytecode_inputs") is None,
    reason="code with streams is compiled from torch 2.10 on",
)
def test_compiled_code_uses_streams_of_its_own() -> None:
    """As transformers' offloaded static cache does."""
    with fxmem.record(steps=1) as recording:
        side = torch.Stream(device="cuda")

        def double(x: Tensor) -> Tensor:
            with side:
                y = x * 2
            torch.cuda.current_stream().wait_stream(side)
            return y + 1

        compiled: Any = torch.compile(double)
        with torch.no_grad():
            compiled(torch.ones(1024, 64, device="cuda"))
    assert recording.steps[0].setup.compile == "compiled"


def test_other_modes_say_what_is_not_counted() -> None:
    recording = record_steps(mode="reduce-overhead")
    note = "in its default mode: pools of CUDA graphs (mode='reduce-overhead') are not counted."
    assert any(each.endswith(note) for each in recording.notes)


class Stack(nn.Module):
    """Asks where it runs, and makes tensors there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if not (x.is_cuda and x.device.type == "cuda" and torch.cuda.is_available()):
            raise RuntimeError("on the CPU")
        if torch.cuda.get_device_capability() < (9, 0):
            raise RuntimeError("on an old GPU")
        x = x + torch.arange(64, device=x.device) + torch.tensor([1.0], device=x.device)
        x = x + torch.ones(64).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            for layer in self.layers:
                x = torch.nn.functional.gelu(layer(x))
        return x.to("cuda", torch.float32)


def compile_layers(model: Stack) -> nn.Module:
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer)
    return model


def analyze_stack(model: nn.Module, **options: Any) -> fxmem.Analysis:
    return fxmem.analyze(model, ("65536x64",), gpu="h100", **options)


def test_a_model_is_compiled_however_it_is_asked_for() -> None:
    asked = analyze_stack(Stack(), compile=True)
    assert asked.setup.compile == "compiled" and asked.setup.frontend == "record"
    eager = analyze_stack(Stack())
    assert asked.peak_bytes < eager.peak_bytes
    peaks = format_bytes(eager.peak_bytes), format_bytes(asked.peak_bytes)
    note = "Eager mode's peak is {}, that of compiled code {}.".format(*peaks)
    assert note in asked.setup.notes
    in_place, wrapped, by_layer = Stack(), torch.compile(Stack()), compile_layers(Stack())
    in_place.compile()
    for model in (in_place, wrapped):
        found = analyze_stack(model)
        assert (found.peak_bytes, found.setup.notes) == (asked.peak_bytes, asked.setup.notes)
        assert [s.name for s in found.graph.storages] == [s.name for s in asked.graph.storages]
    assert analyze_stack(Stack(), compile={"dynamic": True}).setup.compile == "compiled"
    assert analyze_stack(by_layer).setup.compile == "compiled"
    assert analyze_stack(by_layer).setup.compile == "compiled"
    assert analyze_stack(by_layer, compile=False).peak_bytes == analyze_stack(Stack()).peak_bytes


def test_a_container_is_compiled_as_torch_compile_does() -> None:
    """Dynamo leaves the frames of torch.nn alone, nn.Sequential's among them."""
    asked = analyze_stack(nn.Sequential(nn.Linear(64, 64), nn.GELU()), compile=True)
    wrapped = analyze_stack(torch.compile(nn.Sequential(nn.Linear(64, 64), nn.GELU())))
    assert asked.setup.compile == "compiled"
    assert asked.peak_bytes == wrapped.peak_bytes


def test_buffers_lead_to_the_user_s_lines() -> None:
    analysis = analyze_stack(Stack(), compile=True)
    graph = analysis.graph
    names = [each.name.partition(", reused")[0] for each in graph.storages]
    saved = {names[each.storage]: graph.storages[each.storage] for each in analysis.saved}
    # Older releases keep the function too that the layer calls.
    layer = next(name for name in ("layers.1", "layers.1.linear") if f"{name}: addmm" in saved)
    node = graph.nodes[saved[f"{layer}: addmm"].node or 0]
    line = Stack.forward.__code__.co_firstlineno + 9
    assert (node.name, node.source and node.source.line) == (layer, line)
    assert node.saved_bytes and node.forward_flops and node.backward_flops
    assert any(name.startswith("backward of layers.1") for name in names)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sin(self.up(x)) * 1.5)


def test_the_buffers_of_equal_blocks_are_each_of_its_own_in_backward_too() -> None:
    """The code of three blocks is one; what the second hands on, the third keeps as its input."""
    blocks = nn.Sequential(*[torch.compile(Block()) for _ in range(3)])
    analysis = analyze_stack(blocks, autocast="bf16")
    nodes = analysis.graph.nodes
    for each in analysis.graph.storages:
        if each.category is Category.GRADIENT and each.node is not None:
            assert nodes[each.node].fqn == each.name.rpartition(".")[0].rpartition(".")[0]
    assert {
        "0.up: _to_copy, reused for 0.down: _to_copy",
        "backward of 2.down: mm, reused for backward of 2.mul: mul+cos",
        "backward of 0.up: sum",
    } <= {label.replace(".linear", "") for label in analysis.labels}  # which older releases have


class Head(nn.Module):
    """Has products that inductor pads, and a softmax that it takes in one go."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(768, 50257, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(self.head(x).float(), y)


def test_what_inductor_s_passes_make_leads_to_the_user_s_lines_too() -> None:
    analysis = fxmem.analyze(
        Head(), ("4096x768", "4096:int64"), gpu="h200", autocast="bf16", compile=True
    )
    graph = analysis.graph
    padded = [each for each in graph.storages if 50264 in each.shape]
    assert len(padded) >= 3
    for each in padded:
        name = graph.nodes[-1 if each.node is None else each.node].name
        assert name.removesuffix(".linear") == "head"  # which older releases keep
    line = Head.forward.__code__.co_firstlineno + 1
    for each in graph.storages:
        if each.nbytes > 64 * MIB and each.category is Category.TEMPORARY and each.born >= 0:
            node = graph.nodes[-1 if each.node is None else each.node]
            assert node.source and node.source.line == line, analysis.labels[each.index]


def test_results_that_the_loss_leaves_out_get_zeros_as_gradients() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4096))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.sin(x * self.scale), (x * self.scale).mean()

    analysis = fxmem.analyze(Pair(), ("4096x4096",), loss=lambda out: out[1], compile=True)
    names = [each.name for each in analysis.graph.storages if each.nbytes == 64 * MIB]
    assert "zeros, the gradient of an unused output" in names


def test_flexible_attention_keeps_its_result_and_a_row_of_sums() -> None:
    with fxmem.record(gpu="h100", steps=2) as recording:
        attend: Any = torch.compile(flex_attention)
        make_mask: Any = torch.compile(create_block_mask)  # which enters a mode, and leaves it
        modes = torch.overrides._get_current_function_mode_stack()
        text = torch.zeros(512, dtype=torch.int32, device="cuda")  # of each token
        follows = lambda _b, _h, q, k: (q >= k) & (text[q] == text[k])  # noqa: E731 - of torch's
        mask = make_mask(follows, None, None, 512, 512, device="cuda")
        assert torch.overrides._get_current_function_mode_stack() == modes
        x = torch.randn(4, 8, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3):
            attend(x, x, x, block_mask=mask).sum().backward()
            x.grad = None
    kept = {s.storage: s.nbytes for s in recording.steps[-1].saved}
    rows = 4 * 8 * 512
    assert {4 * rows, 2 * 64 * rows} <= {*kept.values()}
    assert sum(kept.values()) < 2 * 2.1 * 64 * rows  # x, the result and little else
    labels = recording.steps[-1].labels
    assert "flex_attention" in labels and "backward of flex_attention" in labels


def test_a_selective_checkpoint_sees_no_buffers_of_compiled_code_within() -> None:
    """As torchtitan has it around flexible attention; on the GPU, C++ makes the buffers."""
    compiled: Any = torch.compile(lambda x: torch.sin(x).cos() + 1)
    seen: list[Any] = []

    def choose(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        seen.append(operator)
        is_saved = operator is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    with fxmem.record(gpu="h100", steps=2) as recording:
        net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(2))).cuda()
        x = torch.randn(4096, 1024, device="cuda")
        for _ in range(3):
            contexts = functools.partial(create_selective_checkpoint_contexts, choose)
            run: Any = lambda x: net[1](compiled(net[0](x)))  # noqa: E731
            checkpoint(run, x, use_reentrant=False, context_fn=contexts).sum().backward()
    names = {str(operator) for operator in seen}
    assert "aten.mm.default" in names and not {"aten.empty_strided.default"} & names
    assert recording.notes == ("torch.compile: 1 graph.",)


def test_attention_that_the_host_lacks_is_compiled() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x).sum()

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        analysis = fxmem.analyze(Attention(), ("2x4x128x64",), mode="infer", compile=True)
    assert analysis.setup.compile == "compiled"
    assert any("efficient_attention" in each.name for each in analysis.graph.operations)


def test_quantiles_are_compiled_that_the_host_would_check() -> None:
    """As weights are quantised in parameter-golf's scripts."""

    class Clipped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            most = torch.quantile(self.weight.abs(), 0.99, dim=1)
            return x @ self.weight.clamp_max(most[:, None]).t()

    analysis = fxmem.analyze(Clipped(64, 64), ("8x64",), mode="infer", compile=True)
    assert analysis.setup.compile == "compiled"


def test_gradients_taken_in_compiled_code() -> None:
    """As Liger's chunked losses take them: a chunk of scores is there at a time, not all."""

    def compute_loss(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight.t()).float().logsumexp(-1).sum()

    take: Any = torch.func.grad_and_value(compute_loss, argnums=(0, 1))

    def train(chunks: int) -> Recording:
        with fxmem.record(gpu="a100-80gb", steps=1) as recording:
            run = torch.compile(take)
            weight = torch.ones(4096, 64, device="cuda")
            x = torch.ones(4096, 64, device="cuda", requires_grad=True)
            parts = [run(each, weight)[0][0] for each in x.detach().chunk(chunks)]
            x.backward(torch.cat(parts))
        return recording

    whole, parts = train(1), train(8)
    assert any(note.startswith("torch.compile: 1 graph") for note in parts.notes)
    scores_bytes = 4096 * 4096 * 4
    assert whole.steps[0].peak_bytes - parts.steps[0].peak_bytes > 7 * scores_bytes // 8


class Attentive(nn.Module):
    """Layers with attention in checkpoints, as transformers' models have them."""

    def __init__(self, *, has_checkpoints: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 192) for _ in range(4))
        self.has_checkpoints = has_checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            arguments = (self.attend, layer, x)
            x = (
                checkpoint(*arguments, use_reentrant=False)
                if self.has_checkpoints
                else (self.attend(layer, x))
            )
        return x

    def attend(self, layer: nn.Module, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in layer(x).chunk(3, -1))
        return x + nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_random_states_of_compiled_checkpoints(device: str) -> None:
    """Attention is a random operator, whose state the partitioner keeps for its second run."""
    given, options = ("4x512x64",), {"device": device, "compile": True}
    kept = fxmem.analyze(Attentive(has_checkpoints=True), given, **options)
    whole = fxmem.analyze(Attentive(has_checkpoints=False), given, **options)
    assert kept.setup.compile == whole.setup.compile == "compiled"
    assert whole.peak_bytes - kept.peak_bytes > 3 * 4 * 512 * 192 * 4 // 2  # of three layers
    states = [s.nbytes for s in kept.graph.storages if s.nbytes in (16, 5056)]
    assert states == ([5056] * 4 if device == "cpu" else [])


def test_compiled_autograd_is_left_out() -> None:
    """As PyTorch's tutorial turns it on: backward ran as a graph that held all activations."""
    peaks = []
    for is_on in (False, True):
        with (
            fxmem.record(gpu="h100", steps=1) as recording,
            torch._dynamo.config.patch(compiled_autograd=is_on),
        ):
            model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).cuda()

            @torch.compile
            def train(model: nn.Module, x: Tensor) -> None:
                model(x).sum().backward()

            train(model, torch.ones(4096, 64, device="cuda"))
        peaks.append(recording.steps[0].peak_bytes)
    assert peaks[0] == peaks[1]
    assert any(note.startswith("Compiled autograd was left out: ") for note in recording.notes)


def test_a_plan_is_of_eager_mode() -> None:
    compiled = analyze_stack(Stack(), compile=True)
    with pytest.raises(UsageError, match="a plan is of eager mode, and this step is compiled"):
        fxmem.plan(compiled, budget="1GiB")


def test_code_that_the_compiler_cannot_take_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr("fxmem.compiling.compiler.lower_graph", fail)
    analysis = analyze_stack(Stack(), compile=True)
    assert analysis.setup.compile == "left out"
    assert analysis.peak_bytes == analyze_stack(Stack()).peak_bytes
    assert any("could not be compiled here" in note for note in analysis.setup.notes)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # 2.9
def test_attention_that_cannot_be_compiled_here_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of 128 channels on an H100 under PyTorch 2.6: flexible attention does not run eagerly."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("No choices to select")

    monkeypatch.setattr("fxmem.compiling.compiler.lower_graph", fail)
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "from torch.nn.attention.flex_attention import flex_attention\n"
        "q = torch.randn(1, 2, 256, 128, device='cuda', requires_grad=True)\n"
        "torch.compile(flex_attention)(q, q, q).sum().backward()\n"
    )
    with pytest.raises(TraceError, match=r"could not be compiled here: .*No choices to select"):
        fxmem.run(str(tmp_path / "train.py"))
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "x = torch.ones(4, device='cuda', requires_grad=True)\n"
        "torch.compile(torch.sin)(x).sum().backward()\n"
        "raise NotImplementedError('another reason')\n"
    )
    with pytest.raises(TraceError, match="another reason"):
        fxmem.run(str(tmp_path / "train.py"))


def test_a_smaller_budget_keeps_less_and_recomputes_more() -> None:
    analysis = analyze_stack(Stack(), compile=True)
    found = fxmem.memory_budgets(analysis, (0.3, 1.0))
    whole, least = found.points
    assert (whole.peak_bytes, whole.overhead) == (analysis.peak_bytes, 0.0)
    assert least.saved_bytes < whole.saved_bytes
    assert least.overhead > 0
    alone = analyze_stack(Stack(), compile=True, activation_memory_budget=0.3)
    assert alone.peak_bytes == least.peak_bytes
    assert "torch.compile: 1 graph, activation_memory_budget 0.3." in alone.setup.notes
    assert "activation_memory_budget  " in found.to_text()
    assert found.to_dict()["points"][1]["peak_bytes"] == least.peak_bytes


def test_the_code_s_own_budget_holds() -> None:
    with torch._functorch.config.patch(activation_memory_budget=0.3):
        own = analyze_stack(Stack(), compile=True)
    assert "torch.compile: 1 graph, activation_memory_budget 0.3." in own.setup.notes


def test_budgets_are_of_compiled_code() -> None:
    eager = analyze_stack(Stack(), activation_memory_budget=0.5)
    note = "activation_memory_budget 0.5 changes nothing: no code is compiled."
    assert note in eager.setup.notes
    with pytest.raises(UsageError, match="activation memory budgets are for compiled code"):
        fxmem.memory_budgets(eager)
    with pytest.raises(UsageError, match="activation_memory_budget is for compiled code"):
        analyze_stack(Stack(), compile=False, activation_memory_budget=0.5)
    with pytest.raises(UsageError, match="activation_memory_budget=2"):
        analyze_stack(Stack(), compile=True, activation_memory_budget=2)


def test_what_is_not_analysed_is_refused() -> None:
    with pytest.raises(UsageError, match=r"torch.compile\(backend='cudagraphs'\) is not analysed"):
        record_steps(backend="cudagraphs")
    with pytest.raises(UsageError, match="compile='yes'"):
        analyze_stack(Stack(), compile="yes")
    with pytest.raises(TraceError, match="fx frontend cannot express this model: it is compiled"):
        analyze_stack(Stack(), compile=True, frontend="fx")


def test_progress_names_the_function_that_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    progress, told = Progress(), list[str]()

    def fail(*_: Any) -> Any:
        told.append(progress.describe())
        raise NotImplementedError

    monkeypatch.setattr("fxmem.compiling.compiler.lower_graph", fail)
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(8, 8).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "@torch.compile\ndef step(x):\n    return model(x).sum()\n"
        "for _ in range(2):\n    step(torch.ones(8, 8).cuda()).backward()\n    optimizer.step()\n"
    )
    fxmem.run(str(script), steps=1, progress=progress)
    assert told[0].endswith("operators, compiling train.py:4")
