"""Tensors of scripts: on the host and on the GPU, and what reads them."""

from __future__ import annotations

import json
import pickle
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from measuring.snapshots import replay_forwards
from running import Call
from sample_nets.scripts import Write
from torch import nn

import fxmem
from benchmarks.allocator_trace import check
from benchmarks.scripts import measure_script, predict_script
from fxmem import Category


def measure_alone(*command: object) -> list[int]:
    """Measures steps in a process of their own, where no other test's tensors are freed."""
    call = [sys.executable, "-m", "benchmarks.scripts", "--only", "real", *map(str, command)]
    real = subprocess.run(call, capture_output=True, text=True, check=True)
    peaks: list[int] = json.loads(real.stdout.splitlines()[-1])
    return peaks


def test_on_the_cpu_steps_take_what_the_real_script_allocates(write: Write, tmp_path: Path) -> None:
    """Weights from a file become parameters as ``from_pretrained`` of transformers makes them."""
    saved = str(tmp_path / "weights.pt")
    torch.save(nn.Linear(10, 10).state_dict(), saved)
    script = write("""
        model, optimizers = make_model(), []
        other = nn.Linear(10, 10, device="meta")
        other.load_state_dict(torch.load(sys.argv[1]), assign=True)
        optimizers = [torch.optim.Adam(m.parameters()) for m in (model, other)]
        for step in range(9):
            x, y = torch.randn(16, 3, 32, 32), torch.zeros(16, 10)
            for optimizer in optimizers:
                loss = F.mse_loss(other(model(x)), y)
                model.zero_grad()
                other.zero_grad()
                loss.backward()
                optimizer.step()
            print(loss.item(), loss)
    """)
    peaks = measure_script(str(script), [saved], 3)
    assert predict_script(str(script), [saved], 3, "cpu") == peaks
    assert len(peaks) == 3


def test_what_is_computed_of_a_number_agrees_with_it(write: Write) -> None:
    """Slices at random places, as ``slice_segments`` in ``commons.py`` of jaywalnut310/vits."""
    text = """
        net = nn.Conv1d(8, 8, 3, padding=1).to("DEVICE")
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            y = net(torch.randn(4, 8, 400, device="DEVICE"))
            starts = (torch.rand(4, device="DEVICE") * 300).to(dtype=torch.long)
            segments = torch.zeros_like(y[:, :, :32])
            for i in range(y.size(0)):
                end = starts[i] + 32
                segments[i] = y[i, :, starts[i]:end]
            segments.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    script = str(write(text.replace("DEVICE", "cpu")))
    assert predict_script(script, [], 3, "cpu") == measure_alone(script)
    assert len(fxmem.run(str(write(text.replace("DEVICE", "cuda")))).steps) == 3


def test_what_the_host_holds_counts_on_the_cpu(write: Write, tmp_path: Path) -> None:
    """Data from a file, tokens and batches; not arrays of NumPy, whose memory is its own."""
    saved = str(tmp_path / "data.pt")
    torch.save(torch.randn(64, 70), saved)
    script = write("""
        import numpy as np
        from torch.utils.data import DataLoader
        data, array = torch.load(sys.argv[1]), torch.from_numpy(np.ones((100, 70), np.float32))
        tokens = torch.cat([torch.tensor(list(range(10))) for _ in range(8)]).view(8, 10).t()
        model = nn.Sequential(nn.Embedding(10, 70), nn.Linear(70, 300), nn.ReLU())
        optimizer = torch.optim.SGD(model.parameters())
        for step, x in enumerate(DataLoader(data, batch_size=16, num_workers=1)):
            real = model[1:](x.to("cpu") + array[:16]).sum()
            loss = real + model(tokens[step].contiguous()).sum()
            loss.backward()
            optimizer.step()
    """)
    # Its loader's worker is forked, which wants a process of few threads.
    assert predict_script(str(script), [saved], 3, "cpu") == measure_alone(script, saved)


def test_operators_of_sparse_tensors_without_a_rule_are_refused(write: Write) -> None:
    with pytest.raises(fxmem.FxmemError, match=r"aten\.sin\.default of sparse tensors"):
        fxmem.run(str(write("torch.eye(8).to_sparse().cuda().sin()")))


DRAWS = """
import json, random
import numpy as np
from torch.utils.data import DataLoader

torch.manual_seed(3), random.seed(3), np.random.seed(3)
path, device = sys.argv[1:]
data = DataLoader([i % 11 for i in range(40)], batch_size=4, shuffle=True)
model = nn.ModuleList([nn.Embedding(11, 70), nn.Dropout(0.3), nn.Linear(70, 33)])
model.requires_grad_().to("cpu" if device == "none" else device)
optimizer, draws = torch.optim.Adam(model.parameters()), []
for x, _ in zip(data, range(3)):
    draws.append([x.tolist(), torch.randint(0, 1000, ()).item(), random.random(), np.random.rand()])
    with open(path, "w") as file:
        json.dump(draws, file)
    if device != "none":  # below, nothing draws on the host that would run on a GPU
        h = model[0](x.to(device)) + torch.randn(70, device=device)
        h = h * torch.bernoulli(torch.full((70,), 0.5, device=device)) * torch.rand_like(h)
        nn.init.orthogonal_(model[2].weight)
        torch.cuda.manual_seed(7) if device == "cuda" else None
        loss = F.dropout(model[2](model[1](h)), 0.1).sum()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_host_draws_what_it_draws_in_a_real_run(
    write: Write, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, real, recorded = str(write(DRAWS)), tmp_path / "real", tmp_path / "recorded"
    monkeypatch.setattr(sys, "argv", [script, str(real), "none" if device == "cuda" else "cpu"])
    runpy.run_path(script)
    fxmem.run(script, [str(recorded), device], device=device)
    assert real.read_text() == recorded.read_text()


@pytest.mark.parametrize("resets", [True, False])
def test_a_script_reads_the_counters_that_the_report_has(
    write: Write, tmp_path: Path, resets: bool
) -> None:
    """As torchtitan's ``components/metrics.py`` reads them, after each step."""
    script = write("""
        import json
        model, cuda = make_model().cuda(), torch.cuda
        optimizer = torch.optim.Adam(model.parameters())
        model[0].register_forward_hook(lambda *_: print(cuda.memory_allocated()))
        rows = []
        for batch in (8, 300, 40, 2):
            if sys.argv[2] == "True":
                cuda.empty_cache()
                cuda.reset_peak_memory_stats()
            optimizer.zero_grad()
            x, y = torch.randn(batch, 3, 32, 32).cuda(), torch.ones(batch).long().cuda()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            stats = cuda.memory_stats()
            rows.append([
                cuda.max_memory_allocated(), torch.accelerator.max_memory_reserved(),
                stats["active_bytes.all.peak"], stats["reserved_bytes.all.peak"],
            ])
            free, total = cuda.mem_get_info()
            assert cuda.memory_reserved() + free < total and stats["num_alloc_retries"] == 0
            assert str(cuda.memory_allocated()) in cuda.memory_summary()
            with open(sys.argv[1], "w") as file:
                json.dump(rows, file)
    """)
    run = fxmem.run(str(script), [str(tmp_path / "rows.json"), str(resets)], gpu="rtx4090")
    reported = [(step.peak_bytes, step.reserved_bytes) for step in run.steps]
    if not resets:
        reported = [max(reported[: at + 1]) for at in range(3)]
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows == [[*peaks, *peaks] for peaks in reported]
    assert not resets or reported[0] < reported[2] < reported[1]


def test_tensors_are_made_by_their_types(write: Write) -> None:
    """As the scripts of eriklindernoren/PyTorch-GAN do, with a gradient penalty on top."""
    script = write("""
        from torch.autograd import Variable

        Tensor = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.FloatTensor
        images = Variable(torch.randn(4, 3, 32, 32, dtype=torch.float64).type(Tensor))
        model = make_model().cuda()
        scores = model(images.requires_grad_())
        ones = Variable(Tensor(*scores.shape).fill_(1.0), requires_grad=False)
        gradients = torch.autograd.grad(scores, images, ones, create_graph=True)[0]
        assert isinstance(gradients, Tensor) and not isinstance(ones.long(), Tensor)
        labels = Variable(torch.ones(4).type("torch.cuda.LongTensor"))
        assert labels.is_cuda and not labels.type(torch.FloatTensor).is_cuda
        (gradients.norm(2, dim=(1, 2, 3)) - 1).pow(2).mean().backward()
    """)
    graph = fxmem.run(str(script)).largest.graph
    made = {(s.shape, s.dtype) for s in graph.storages}
    assert {((4, 3, 32, 32), "float32"), ((4, 10), "float32"), ((4,), "int64")} <= made


def test_a_model_that_the_script_drops_is_freed(write: Write) -> None:
    script = write("""
        held = set()
        for _ in range(2):
            model = make_model().cuda()
            model(torch.ones(2, 3, 32, 32, device="cuda")).sum().backward()
            del model
            held.add(torch.cuda.memory_allocated())
        assert len(held) == 1, held
    """)
    fxmem.run(str(script))


def test_tensors_are_made_where_the_script_wants_them(write: Write) -> None:
    """As pytorch/examples' ``actor_critic.py`` makes its returns, and as older code does."""
    script = write("""
        x = torch.randn(8, 4).to(0)
        assert x.is_cuda and torch.ones(3, device=0).is_cuda and torch.ones(3).cuda(0).is_cuda
        assert x.new_tensor([1, 2]).is_cuda and x.new([1.0, 2.0]).is_cuda and x.new(3, 2).is_cuda
        assert x.new(x.size()).shape == x.shape
        mean = nn.Linear(4, 1).cuda()(x).mean()
        assert torch.tensor([mean, 2.0]).tolist() == [1, 2]
        assert torch.tensor([[mean], [mean]], device="cuda").is_cuda
        assert torch.equal(x, x) and torch.allclose(x, x)
        torch.set_default_device("cuda")
        assert torch.ones(3).is_cuda and nn.Linear(3, 3).weight.is_cuda
        torch.set_default_tensor_type("torch.cuda.HalfTensor")  # as amdegroot/ssd.pytorch
        assert torch.ones(3).is_cuda and torch.ones(3).dtype == torch.float16
    """)
    assert fxmem.run(str(script)).largest.peak_bytes > 0
    assert torch.ones(1).device.type == "cpu" and torch.ones(1).dtype == torch.float32


def test_what_is_copied_between_host_and_gpu(write: Write, tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(1000)}, tmp_path / "weights.pt")
    script = write(f"""
        loaded = torch.load({str(tmp_path / "weights.pt")!r}, map_location="cuda")
        assert loaded["weight"].is_cuda
        generator = torch.Generator(device="cuda").manual_seed(1)
        noise = torch.randn(1000, generator=generator, device="cuda")
        lengths = torch.tensor([3, 5], device="cuda")
        kept = torch.zeros(max(lengths.tolist()), 250, device="cuda")  # of known values
        host = torch.zeros(1000)
        host.copy_(noise)
        assert host.sum() == 0
        chosen = noise[noise > 0]
        assert chosen.shape == (1000,)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.synchronize()
        print(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated() >= 4096)
    """)
    run = fxmem.run(str(script))
    shapes = {(s.shape, s.category) for s in run.largest.graph.storages}
    assert ((5, 250), Category.TEMPORARY) in shapes


SIDE_STREAM = """
    side = torch.cuda.Stream() if "side" in sys.argv else torch.cuda.current_stream()
    net = nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        with torch.cuda.stream(side):  # as loaders do that fetch the next batch meanwhile
            batch = torch.randn(8192, 1024).to("cuda", non_blocking=True)
            batch = batch * 2
        torch.cuda.current_stream().wait_stream(side)
        batch.record_stream(torch.cuda.current_stream())
        net(batch).relu().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_side_stream_reserves_memory_of_its_own(write: Write, tmp_path: Path) -> None:
    script = str(write(SIDE_STREAM))
    alone, beside = (fxmem.run(script, arguments).largest for arguments in ([], ["side"]))
    assert beside.peak_bytes == alone.peak_bytes
    assert beside.reserved_bytes > alone.reserved_bytes
    assert {storage.stream for storage in alone.graph.storages} == {0}
    on_side = {s.shape for s in beside.graph.storages if s.stream == 1}
    assert on_side == {(8192, 1024)}
    # The reports name the stream.
    fxmem.render(beside, tmp_path / "step.pickle")
    snapshot = pickle.loads((tmp_path / "step.pickle").read_bytes())
    (trace,) = snapshot["device_traces"]
    assert {event["stream"] for event in trace} == {s["stream"] for s in snapshot["segments"]}
    assert max(replay_forwards(snapshot)) == beside.requested_bytes
    (result,) = check(tmp_path / "step.pickle")
    assert (result.difference, result.reserved_bytes) == ("", beside.reserved_bytes)
    storages = beside.to_dict()["storages"]
    assert [s.get("stream", 0) for s in storages] == [s.stream for s in beside.graph.storages]
    assert fxmem.Analysis.from_json(json.dumps(beside.to_dict())).graph.storages[-1].stream in (
        0,
        1,
    )


@torch.library.custom_op("fxmem_test::split", mutates_args=())
def split(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


split.register_fake(torch.empty_like)


def test_operators_of_extensions_are_named(write: Write) -> None:
    hint = "counted as 0 (fxmem.register_workspace)"
    note = f"The workspace of fxmem_test::split is not known: {hint}."
    script = write("torch.ops.fxmem_test.split(torch.ones(8, device='cuda')).relu()")
    assert fxmem.run(str(script)).notes == (note,)
    model = Call(lambda x: torch.ops.fxmem_test.split(x).relu())
    assert fxmem.analyze(model, "8", mode="infer").setup.notes == (note,)


def test_the_modules_of_torch_cuda_answer_as_it_does(write: Write) -> None:
    """As libraries import their functions: ``torch.cuda.random.get_rng_state``."""
    script = write(
        """
        state = torch.cuda.random.get_rng_state()
        torch.cuda.random.set_rng_state(state)
        torch.cuda.random.manual_seed(1)
        assert torch.cuda.random.initial_seed() == 0
        with torch.cuda.stream(torch.cuda.streams.Stream()):
            x = torch.ones(8, device="cuda", requires_grad=True)
        x.sum().backward()
        """
    )
    assert fxmem.run(str(script)).largest.peak_bytes > 0


def test_operators_that_find_rows_find_all_of_them(write: Write) -> None:
    """As torchvision's ``nms`` does, whose fake asks for a size."""
    script = write(
        """
        @torch.library.custom_op("mine::nms", mutates_args=())
        def nms(boxes: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return torch.arange(len(boxes) // 2, device=boxes.device)

        @nms.register_fake
        def _(boxes, scores):
            size = torch.library.get_ctx().new_dynamic_size()
            return boxes.new_empty(size, dtype=torch.long)

        model = nn.Linear(8, 4).cuda()
        boxes = model(torch.ones(100, 8).cuda())
        found = boxes[nms(boxes.detach(), boxes.detach()[:, 0])]
        print(len(found))
        found.sum().backward()
        """
    )
    run = fxmem.run(str(script))
    assert any("nms" in operation.name for operation in run.steps[0].graph.operations)
    assert [read.value for read in run.reads] == ["as many as there are elements"]


def test_gradients_of_a_graph_of_their_own_are_added_out_of_place(write: Write) -> None:
    """As the penalty of WGAN-GP asks for; against the CPU's profiler."""
    script = write("""
        weight = nn.Parameter(torch.ones(1 << 18))
        optimizer = torch.optim.SGD([weight])
        for step in range(9):
            x = weight * 1
            y = ((x * 2).sum() + (x * 3).sum()) * weight.mean()
            penalty = torch.autograd.grad(y, x, create_graph=True)[0].square().sum()
            penalty.backward()
            optimizer.step()
            optimizer.zero_grad()
    """)
    expected = pytest.approx(measure_alone(script), rel=1e-4)
    assert predict_script(str(script), [], 3, "cpu") == expected


def test_ranges_on_the_cpu_are_real(write: Write) -> None:
    """As ``pack_padded_sequence`` sorts lengths with one; against the CPU's profiler."""
    script = write("""
        torch.manual_seed(0)
        lstm, utils = nn.LSTM(8, 8, batch_first=True), nn.utils.rnn
        optimizer = torch.optim.Adam(lstm.parameters())
        for step in range(9):
            lengths = torch.randint(1, 20, (32,))
            x = utils.pack_padded_sequence(torch.randn(32, 20, 8), lengths, True, False)
            out, _ = utils.pad_packed_sequence(lstm(x)[0], batch_first=True)
            optimizer.zero_grad()
            out.sum().backward()
            optimizer.step()
    """)
    assert predict_script(str(script), [], 3, "cpu") == measure_alone(script)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_lazy_modules_move_before_they_have_sizes(
    write: Write, tmp_path: Path, device: str
) -> None:
    """As in the chapters of d2l.ai, and in PyG's examples of heterogeneous graphs."""
    lazy = """
        torch.manual_seed(0)
        layers = nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(4)
        net = nn.Sequential(*layers)
        net.to(sys.argv[1])
        images = torch.rand(16, 3, 32, 32, device=sys.argv[1])
        net(images)
        optimizer = torch.optim.Adam(net.parameters())
        for step in range(3):
            net(images).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    script = write(lazy)
    run = fxmem.run(str(script), [device], device=device)
    names = [s.name for s in run.largest.peak.live if s.category is Category.PARAMETER]
    assert sorted(names) == [
        "net.0.bias", "net.0.weight", "net.1.bias", "net.1.weight", "net.3.bias", "net.3.weight",
    ]  # fmt: skip
    if device == "cpu":
        assert [step.peak_bytes for step in run.steps] == measure_alone(
            script, device, "--steps", 3
        )


def test_values_on_the_gpu_are_leaves(write: Write) -> None:
    """As the logarithm of a temperature that an actor learns, in CleanRL's soft actor-critic."""
    script = write("""
        model = make_model().cuda()
        scale = torch.tensor([0.5, 2.0], requires_grad=True, device="cuda")
        other = scale.new_tensor([1.0], requires_grad=True, device="cuda")
        optimizer = torch.optim.Adam([scale, other, *model.parameters()])
        for step in range(3):
            loss = (model(torch.randn(2, 3, 32, 32).cuda()) * scale[0] * other).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert scale.is_leaf and scale.grad.shape == (2,) and other.grad is not None
    """)
    assert len(fxmem.run(str(script)).steps) == 3


def test_what_moves_to_meta_takes_nothing_on_the_cpu(write: Write) -> None:
    """As PyTorch's tutorial of ensembles has a model without memory to call the others by."""
    script = write("""
        import copy

        model = nn.Linear(256, 256)
        base = copy.deepcopy(model).to("meta")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            x = torch.randn(8, 256)
            torch.func.functional_call(base, dict(model.named_parameters()), (x,)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    """)
    run = fxmem.run(str(script), device="cpu")
    assert [step.peak_bytes for step in run.steps] == measure_alone(script, "--steps", 3)
