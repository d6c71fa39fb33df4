"""Training scripts as people write them, run where no GPU is."""

from __future__ import annotations

import json
import math
import pickle
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from measuring.snapshots import replay_forwards
from running import Call
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import fxmem
from benchmarks.allocator_trace import check
from benchmarks.scripts import measure_script, predict_script
from fxmem import Category, FxmemError, Phase, ScriptRun, TraceError, UsageError
from fxmem.gpus import CONTEXT_BYTES
from fxmem.graph import RESIDENT
from fxmem.scripts.batches import FullestBatches
from fxmem.scripts.windows import Windows
from fxmem.units import format_bytes

MODEL = """
import copy, math, os, sys
import torch
from torch import nn
from torch.nn import functional as F

def make_model():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(14400, 10)
    )
"""
EVERY_HABIT = """
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
assert torch.cuda.get_device_name() and torch.cuda.get_device_properties(0).total_memory > 2**30
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # before the model is moved
model = torch.compile(model.to(device))
average = copy.deepcopy(model).requires_grad_(False)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
scaler = torch.amp.GradScaler()
data = TensorDataset(torch.randn(256, 3, 32, 32), torch.randint(0, 10, (256,)))
loader = DataLoader(data, batch_size=32, num_workers=1, pin_memory=True)
best = math.inf
for step, (x, y) in enumerate(loader):
    assert not x.is_cuda
    x, y = x.to(device, non_blocking=True), y.cuda()
    assert x.is_cuda and x.device == device or x.device == torch.device("cuda:0")
    with torch.autocast(device.type, dtype=torch.float16):
        output = model(x)
        loss = F.cross_entropy(output, y) / 2
    if torch.isnan(loss):
        raise SystemExit("diverged")
    scaler.scale(loss).backward()
    if step % 2 == 0:
        continue
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    scheduler.step()
    with torch.no_grad():
        for mean, value in zip(average.parameters(), model.parameters()):
            mean.lerp_(value, 0.1)
    model.eval()
    with torch.no_grad():
        correct = (model(x).argmax(1) == y).sum().item()
    model.train()
    print(f"{loss.item():.3f} {loss:.3f} {norm} {correct / len(y)} {output.detach().cpu().numpy()}")
    accuracy = 100 * correct / len(y)
    if accuracy > 50:
        print("good")
    if loss < best:
        best = float(loss)
        torch.save({"model": model.state_dict()}, sys.argv[1])
    with open(sys.argv[1] + ".log", "a") as log:
        log.write("a step\\n")
"""
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.write_text(MODEL + textwrap.dedent(text))
        return path

    return write


def test_a_script_with_every_habit_runs_unchanged(write: Write, tmp_path: Path) -> None:
    script, saved = write(EVERY_HABIT), tmp_path / "model.pt"
    run = fxmem.run(str(script), [str(saved)], gpu="rtx4090")
    assert [step.setup.window for step in run.steps] == ["step 1", "step 2", "step 3"]
    assert run.steps[1].peak_bytes == run.steps[2].peak_bytes == run.largest.peak_bytes
    assert run.steps[0].peak_bytes < run.largest.peak_bytes  # the optimizer's state came with it
    lines = {read.source.line: read for read in run.reads}
    text = script.read_text().splitlines()
    assert {text[at - 1].strip().partition("(")[0] for at in lines} == {
        *("print", "correct = ", "if accuracy > 50:", "if loss < best:"),
    }
    decided = {text[at - 1].strip(): read.value for at, read in lines.items() if read.decides}
    assert decided == {"if accuracy > 50:": "False", "if loss < best:": "False"}
    assert "torch.compile: 2 graphs, 1 recompilation." in run.notes  # to train and to evaluate
    assert not saved.exists()
    assert (tmp_path / "model.pt.log").read_text() == "a step\n" * 3  # a step follows in eager mode
    labels = {run.largest.labels[s.index] for s in run.largest.graph.storages}
    assert {"model.0.weight", "model.4.weight.grad", "model.4.weight.exp_avg"} <= labels
    assert str(run).startswith("Peak ") and "<svg" in run._repr_html_()
    # Nothing of this is left in the process.
    assert not torch.cuda.is_available()
    assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().item() != 1
    torch.save({}, tmp_path / "empty.pt")


def test_a_step_takes_what_it_takes_in_an_analysis(write: Write) -> None:
    script = write("""
        model = make_model().to("cuda")
        optimizer = torch.optim.Adam(model.parameters())
        x = torch.randn(64, 3, 32, 32, device="cuda")
        y = torch.randint(0, 10, (64,), device="cuda")
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                output = model(x)
                loss = F.cross_entropy(output, y)
            loss.backward()
            optimizer.step()
    """)
    run = fxmem.run(str(script), gpu="h100")
    namespace: dict[str, Callable[[], nn.Module]] = {}
    exec(MODEL, namespace)
    analysis = fxmem.analyze(
        namespace["make_model"](),
        "64x3x32x32",
        loss="cross_entropy",
        optimizer="adam",
        autocast="bf16",
        hold_outputs=True,
        gpu="h100",
    )
    assert run.largest.peak_bytes == analysis.peak_bytes
    assert run.largest.reserved_bytes == analysis.reserved_bytes
    assert run.largest.saved_bytes == analysis.saved_bytes
    assert run.largest.forward_flops == analysis.forward_flops
    assert run.largest.backward_flops == analysis.backward_flops
    assert run.largest.peak.source is not None
    assert run.largest.peak.source.file == str(script)


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
    command = [sys.executable, "-m", "benchmarks.scripts", "--only", "real", script, saved]
    real = subprocess.run(command, capture_output=True, text=True, check=True)
    peaks = json.loads(real.stdout.splitlines()[-1])
    assert predict_script(str(script), [saved], 3, "cpu") == peaks


def test_a_sparse_tensor_of_the_data_is_refused(write: Write) -> None:
    """As the adjacency matrix of ``train.py`` of tkipf/pygcn."""
    with pytest.raises(fxmem.FxmemError, match="sparse gradients and tensors are not supported"):
        fxmem.run(str(write("torch.eye(8).to_sparse().cuda() @ torch.ones(8, 8).cuda()")))


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


def test_lbfgs_fills_its_history(write: Write) -> None:
    """As ``time_sequence_prediction/train.py`` of pytorch/examples."""
    script = write("""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
        nn.init.orthogonal_(model[0].weight)  # as super_resolution/model.py of pytorch/examples
        optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=5, history_size=10)
        x, y = torch.randn(256, 8), torch.randn(256, 4)
        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss
        while True:
            optimizer.step(closure)
    """)
    peaks = measure_script(str(script), [], 3)
    assert predict_script(str(script), [], 3, "cpu") == pytest.approx(peaks, rel=0.02)


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


def test_all_after_the_last_step_runs_until_another_begins(write: Write, tmp_path: Path) -> None:
    script = write("""
        model = make_model().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        try:
            for step in range(9):
                model(torch.ones(8, 3, 32, 32).cuda()).sum().backward()
                optimizer.step()
                scheduler.step()
                norm = torch.stack([p.grad.norm() for p in model.parameters()]).sum()
                with open(sys.argv[1], "a") as log:
                    log.write(f"{step} {norm.item():.0f} ")
                if step == 1:
                    1 / 0
        finally:
            model(torch.ones(8, 3, 32, 32).cuda())
            os.remove(sys.argv[1])
    """)
    log = tmp_path / "log"
    run = fxmem.run(str(script), [str(log)], steps=2)
    assert len(run.steps) == 2 and log.read_text() == "0 1 1 1 "


def test_evaluation_alone_is_one_step(write: Write) -> None:
    script = write("""
        model = make_model().cuda().eval()
        with torch.inference_mode():
            output = model(torch.ones(8, 3, 32, 32).cuda())
        print(output, output.tolist()[0][0], output.cpu().numpy().mean())
    """)
    run = fxmem.run(str(script))
    assert [step.setup.window for step in run.steps] == ["step 1"]
    assert run.largest.peak.phase is Phase.FORWARD
    assert run.largest.setup.optimizer is None


def test_a_closure_is_the_step_s_forward_and_backward(write: Write) -> None:
    script = write("""
        model = make_model().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        def closure():
            optimizer.zero_grad()
            x, y = torch.randn(8, 3, 32, 32).cuda(), torch.ones(8).long().cuda()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss
        for _ in range(3):
            optimizer.step(closure)
    """)
    largest = fxmem.run(str(script), steps=2).largest
    phases = {operation.phase for operation in largest.graph.operations}
    assert phases == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    assert largest.peak.phase is Phase.BACKWARD
    assert any(node.name == "cross_entropy" for node in largest.nodes)


def test_parameters_updated_by_hand_end_a_step_with_backward(write: Write) -> None:
    """As ``word_language_model/main.py`` of pytorch/examples, whose loop is endless otherwise."""
    script = write("""
        model = make_model().cuda()
        while True:
            model.zero_grad()
            loss = model(torch.randn(8, 3, 32, 32).cuda()).sum()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(parameter.grad, alpha=-0.1)
    """)
    run = fxmem.run(str(script))
    assert [step.setup.window for step in run.steps] == ["step 1", "step 2", "step 3"]
    assert run.steps[1].peak_bytes == run.steps[2].peak_bytes


def test_a_step_does_not_wait_long_for_an_optimizer(write: Write) -> None:
    """As ``mnist_forward_forward/main.py`` of pytorch/examples, an optimizer for each layer."""
    script = write("""
        layers = [nn.Linear(8, 8).cuda() for _ in range(2)]
        optimizers = [torch.optim.Adam(layer.parameters()) for layer in layers]
        x = torch.randn(4, 8).cuda()
        for layer, optimizer in zip(layers, optimizers):
            for _ in range(1000):
                optimizer.zero_grad()
                layer(x).sum().backward()
                optimizer.step()
    """)
    run = fxmem.run(str(script))
    assert run.notes[0].startswith("1 of the script's optimizers did not step while another did")
    linears = [sum(node.name.startswith("layer") for node in step.nodes) for step in run.steps]
    assert linears == [100, 1, 1]


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


def test_modules_have_the_names_of_the_script(write: Write) -> None:
    script = write("""
        class Trainer:
            def __init__(self):
                self.net = nn.DataParallel(make_model()).cuda()
        trainer = Trainer()
        critic = nn.Linear(10, 1).cuda()
        Trainer.run = lambda self: critic(self.net(torch.ones(4, 3, 32, 32))).sum().backward()
        trainer.run()
    """)
    names = [node.name for node in fxmem.run(str(script)).largest.nodes]
    assert {"net.module.0", "net.module.4", "critic", "sum"} <= set(names)


def test_averages_of_weights_have_the_names_of_the_script(write: Write) -> None:
    # As timm's ModelEmaV3, ultralytics' ModelEMA and diffusers' EMAModel keep them.
    script = write("""
        import copy
        from types import SimpleNamespace
        net = nn.Linear(3, 5).cuda()
        average = SimpleNamespace(ema=copy.deepcopy(net), data=[0] * 100_000)
        shadow = {"weights": [each.detach().clone() for each in net.parameters()]}
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(2):
            net(torch.ones(2, 3, device="cuda")).sum().backward()
            optimizer.step()
            for kept, each in zip(shadow["weights"], net.parameters()):
                kept.lerp_(each.detach(), 0.1)
    """)
    found = fxmem.run(str(script)).steps[-1].graph.storages
    named = {(each.name, each.category) for each in found if each.born == RESIDENT}
    assert named >= {
        ("average.ema.weight", Category.PARAMETER),
        ("average.ema.bias", Category.PARAMETER),
        ("shadow.weights.0", Category.BUFFER),
        ("shadow.weights.1", Category.BUFFER),
    }


COMPILED = """
net = nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

@torch.compile
def loss_of(x):
    return (net(x).tanh().sin() + 1).square().mean()

for step in range(STEPS):
    optimizer.zero_grad()
    loss_of(torch.ones(8192, 512, device="cuda")).backward()
    optimizer.step()
    print("stepped")
"""


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:Skipping serialization")  # 2.6, of its own settings
def test_a_step_in_eager_mode_follows_those_of_compiled_code(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    script = write(COMPILED.replace("STEPS", "9"))
    run = fxmem.run(str(script), gpu="h100", steps=2)
    assert capsys.readouterr().out == "stepped\n" * 3
    eager = fxmem.run(str(script), gpu="h100", compile=False)
    assert eager.largest.peak_bytes > run.largest.peak_bytes + 32 * 1024**2  # of sin's input
    assert len(run.steps) == 2
    labels = {*run.largest.labels}  # of a module that compiled code alone calls
    assert {"net.weight", "net.bias", "net.weight.grad"} <= labels
    assert run.notes == (
        "torch.compile: 1 graph.",
        f"Eager mode's peak is {format_bytes(eager.largest.peak_bytes)}, "
        f"that of compiled code {format_bytes(run.largest.peak_bytes)}.",
    )
    # A script that ends with its steps gives nothing to compare.
    assert fxmem.run(str(write(COMPILED.replace("STEPS", "2"))), steps=2).notes == run.notes[:1]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("raise ValueError('no data')", r"train.py failed at train.py:11: ValueError: no data"),
        (
            "torch.ones(2, 3).cuda() @ torch.ones(2, 3).cuda()",
            r"at train.py:11: RuntimeError: .*\(see the whole traceback with --debug\)$",
        ),
        ("print(make_model()(torch.ones(1, 3, 32, 32)))", "train.py ended without an operation"),
        (
            "from torch.nn.attention.flex_attention import flex_attention\n"
            "x = torch.ones(1, 1, 128, 16).cuda()\nflex_attention(x, x, x)",
            "flex_attention at train.py:13 runs without torch.compile, which is not analysed",
        ),
        ("sys.exit('usage: train.py DATA')", "ended with exit code 'usage: train.py DATA' before"),
    ],
)
def test_scripts_that_end_early_are_explained(write: Write, text: str, cause: str) -> None:
    with pytest.raises(TraceError, match=cause):
        fxmem.run(str(write(text)))


def test_bad_arguments_are_explained(write: Write) -> None:
    with pytest.raises(UsageError, match=r"no script 'nope.py'"):
        fxmem.run("nope.py")
    with pytest.raises(UsageError, match="--steps must be 1 or more, got 0"):
        fxmem.run(str(write("")), steps=0)
    run: ScriptRun = fxmem.run(str(write("torch.ones(4, device='cuda') + 1")))
    with pytest.raises(UsageError, match="a plan is for a model, and this is a step of a script"):
        fxmem.plan(run.largest, budget="1GiB")


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


BLOCKS = """
import sys, torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torch.distributed.fsdp import fully_shard

class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        layers = (nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3))
        self.blocks = nn.ModuleList(layers)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""
SHARDED = """
torch.distributed.init_process_group("nccl")
rank = torch.distributed.get_rank()
device = torch.device("cuda", rank)
with torch.device("meta"):
    model = Blocks()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
model.to_empty(device=device)
for module in model.modules():
    if isinstance(module, nn.Linear):
        module.reset_parameters()
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(32, 64, device=device)
for _ in range(9):
    optimizer.zero_grad()
    output = model(x)
    loss = output.sum()
    loss.backward()
    optimizer.step()
torch.distributed.destroy_process_group()
"""


def test_a_rank_of_a_script_takes_what_it_takes_in_an_analysis(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BLOCKS + SHARDED)
    (tmp_path / "net.py").write_text(BLOCKS)
    run = fxmem.run(str(tmp_path / "train.py"), world_size=4, rank=1)
    options = {"mesh": {"dp": 4}, "parallelize": "fsdp", "rank": 1, "optimizer": "adamw"}
    analysis = fxmem.analyze(f"{tmp_path}/net.py:Blocks", "32x64", **options)  # type: ignore[arg-type]
    assert run.steps[1].peak_bytes == analysis.peak_bytes
    assert run.steps[1].parameter_bytes == analysis.parameter_bytes


def test_a_script_sees_the_backend_that_it_asked_for(write: Write) -> None:
    """With NCCL the gradient of a gathered tensor is reduced as it is scattered."""
    script = write("""
        import warnings
        import torch.distributed as dist
        from torch.distributed.nn.functional import all_gather

        warnings.simplefilter("ignore")  # it is deprecated from 2.13 on
        dist.init_process_group(backend="nccl")
        assert dist.get_backend() == dist.Backend.NCCL
        assert dist.get_backend(dist.new_group(backend="gloo")) == "gloo"
        x = torch.ones(8, device="cuda", requires_grad=True)
        torch.cat(all_gather(x)).sum().backward()
    """)
    graph = fxmem.run(str(script), world_size=4).largest.graph
    names = [operation.name for operation in graph.operations]
    assert any("reduce_scatter" in name for name in names) and "aten.stack.default" not in names


def test_a_rank_that_is_not_there(write: Write) -> None:
    with pytest.raises(UsageError, match="no rank 4 of 4"):
        fxmem.run(str(write("")), world_size=4, rank=4)


def test_a_script_under_a_wrapper_has_names_and_the_buffers_of_nccl(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        BLOCKS
        + textwrap.dedent(
            """
            torch.distributed.init_process_group("nccl")
            model = nn.parallel.DistributedDataParallel(Blocks().cuda(), device_ids=[0])
            optimizer = torch.optim.SGD(model.parameters())
            for _ in range(3):
                model(torch.randn(4, 64, device="cuda")).sum().backward()
                optimizer.step()
            """
        )
    )
    run = fxmem.run(str(script), world_size=2)
    assert "model.module.blocks.2.0" in {node.name for node in run.largest.nodes}
    analysis = fxmem.analyze(nn.Linear(4, 4), "2x4", mesh={"dp": 2}, parallelize="ddp")
    assert run.largest.context_bytes == analysis.context_bytes  # with the buffers of NCCL
    assert fxmem.run(str(script), world_size=1).largest.context_bytes == CONTEXT_BYTES


NESTED = """
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(2)
        )

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x

def run(device):
    model, x = Blocks().to(device), torch.randn(8, 16, device=device)
    loss = model(x).sum()
    loss.backward()
    for parameter in model.parameters():
        parameter.data.sub_(parameter.grad)
"""


def test_a_backward_before_the_first_optimizer_is_no_step(write: Write) -> None:
    """As in modded-nanogpt's scripts, "to prevent a bug on some systems"."""
    script = write(
        """
        torch.empty(1, device="cuda", requires_grad=True).backward()
        layer = nn.Linear(4, 4, device="cuda")
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        for _ in range(3):
            layer(torch.ones(2, 4, device="cuda")).sum().backward()
            optimizer.step()
        """
    )
    steps = fxmem.run(str(script), steps=2).steps
    assert [step.setup.window for step in steps] == ["warm-up 1", "step 1", "step 2"]


def test_backward_of_several_results_ends_a_step(write: Write) -> None:
    """As Liger-Kernel's benchmark of a norm with its sum: there is no optimizer."""
    script = write(
        """
        x = torch.ones(256, 1024, device="cuda", requires_grad=True)
        for _ in range(2):
            y, z = x.exp(), x.sin()
            torch.autograd.backward((y, z), (torch.ones_like(y), torch.ones_like(z)))
            x.grad = None
        """
    )
    first, second = fxmem.run(str(script)).steps
    assert first.peak_bytes == second.peak_bytes == 2**20 * (3 + 2 + 2)  # x, y, z; ones; gradients


def test_a_script_that_loads_alone_is_reported(write: Write) -> None:
    script = write("optimizer = torch.optim.SGD(nn.Linear(512, 512).cuda().parameters(), 0.1)")
    run = fxmem.run(str(script))
    assert [step.setup.window for step in run.steps] == ["loading"]
    assert run.largest.peak_bytes == (512 * 512 + 512) * 4


def test_loading_has_a_peak_and_lines_of_its_own(write: Write) -> None:
    """A model that is cast on the GPU is there twice, which a step of adapters never is."""
    script = write(
        """
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)]).cuda()
        model = model.bfloat16().requires_grad_(False)
        head = nn.Linear(1024, 8, dtype=torch.bfloat16, device="cuda")
        optimizer = torch.optim.SGD(head.parameters(), 0.1)
        for _ in range(3):
            x = torch.ones(2, 1024, dtype=torch.bfloat16, device="cuda")
            head(model(x)).sum().backward()
            optimizer.step()
        """
    )
    run = fxmem.run(str(script))
    assert run.loading is run.largest and len(run.steps) == 3
    # Each weight is freed once it is cast, but for the one that is being cast and what it was.
    assert run.loading.peak_bytes == 16 * 1024**2 * 4 + 1024**2 * 2
    peak = run.loading.peak
    assert (peak.phase.value, str(peak.source)) == ("loading", "train.py:13")
    assert {s.category.value for s in peak.live} == {"PARAMETER"}
    assert str(run).startswith("Peak 66.00 MiB in loading of Sequential.to_1, train.py:13\n")
    assert run.to_dict()["script"]["loading"]["peak_bytes"] == run.loading.peak_bytes


def test_a_backward_within_backward_recomputes_and_ends_no_step(write: Write) -> None:
    """As a reentrant checkpoint's: without an optimizer the outer backward alone ends a step."""
    script = write(f"{NESTED}\nfor _ in range(3):\n    run('cuda')\n")
    _, *steps = fxmem.run(str(script)).steps  # the first one's input is there before
    scope: dict[str, Any] = {}
    exec(MODEL + NESTED, scope)
    with FlopCounterMode(display=False) as counted:
        scope["run"]("cpu")
    for step in steps:
        assert step.forward_flops + step.backward_flops == counted.get_total_flops()
        assert step.saved_bytes == 3 * 8 * 16 * 4  # what the layer and the checkpoints take
        again = [o for o in step.graph.operations if o.recomputed and o.flops]
        assert [o.name for o in again] == ["aten.addmm.default"] * 4


@pytest.mark.parametrize(
    ("line", "package", "hint"),
    [
        ("import mamba_ssm.ops", "mamba_ssm", "MAMBA_SKIP_CUDA_BUILD"),
        (
            "raise ImportError('the package causal-conv1d does not seem to be installed')",
            "causal_conv1d",
            "CAUSAL_CONV1D_SKIP_CUDA_BUILD",
        ),
        (
            "from importlib.metadata import version; version(\"The 'deepspeed>=0.9.3' package\")",
            "deepspeed",  # likewise
            "fully_shard",
        ),
    ],
)
def test_packages_with_kernels_that_are_absent_say_what_to_do(
    write: Write, line: str, package: str, hint: str
) -> None:
    with pytest.raises(FxmemError) as raised:
        fxmem.run(str(write(line)))
    cause = f"train.py:11 needs {package}, which is not installed"
    assert raised.value.cause.startswith(cause) and hint in raised.value.hint


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("raise ImportError('cannot import name sdpa from a')", "whole traceback"),
        ("make_model().cuda()(torch.ones(2, 3).cuda())", "whole traceback"),  # no --input to mend
        ("nn.Embedding(4, 4).cuda()(torch.ones(2).cuda())", "whole traceback"),
        ("torch.distributed.get_rank()", "fxmem run --world-size 8"),
    ],
)
def test_hints_speak_of_scripts(write: Write, line: str, hint: str) -> None:
    with pytest.raises(TraceError) as raised:
        fxmem.run(str(write(line)))
    assert hint in raised.value.hint


def test_reads_of_a_library_have_the_script_s_line_too(write: Write, tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "fxmem_test_meter.py").write_text("def read(x):\n    return bool(x > 0)\n")
    script = write(
        f"""
        sys.path.append({str(folder)!r})
        from fxmem_test_meter import read
        x = torch.empty((), device="cuda")
        read(x * 2)
        """
    )
    run = fxmem.run(str(script))
    (read,) = run.reads
    assert (read.source.line, read.decides, str(read.library)) == (
        *(15, True, "fxmem_test_meter.py:2"),
    )
    assert "train.py:15 in fxmem_test_meter.py:2" in str(run)


@pytest.mark.parametrize(("long", "given", "steps"), [(5, None, 2), (5, 3, 3), (999, None, 3)])
def test_of_long_steps_two_are_recorded_unless_more_are_asked_for(
    write: Write, monkeypatch: pytest.MonkeyPatch, long: int, given: int | None, steps: int
) -> None:
    monkeypatch.setattr("fxmem.scripts.windows.LONG_STEP", long)
    script = write(
        """
        model = nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(4):
            model(torch.randn(2, 8, device="cuda")).sum().backward()
            optimizer.step()
        """
    )
    assert len(fxmem.run(str(script), steps=given).steps) == steps


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


def test_loaders_and_optimizers_keep_their_signatures(tmp_path: Path) -> None:
    """Lightning makes a loader again, with the arguments whose names the signature has."""
    script = tmp_path / "train.py"
    script.write_text(
        f"{MODEL}\nimport inspect\n"
        "for kind in (torch.utils.data.DataLoader, torch.optim.Optimizer):\n"
        "    assert set(inspect.signature(kind.__init__).parameters) & {'dataset', 'defaults'}\n"
        "torch.ones(1, device='cuda', requires_grad=True).sum().backward()\n"
    )
    assert fxmem.run(str(script)).largest.peak_bytes > 0


EVALUATES = """
model = nn.Linear(1024, 1024, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(20):
    model(torch.ones(2, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 4:
        with torch.no_grad():
            results = [model.eval()(torch.ones(4096, 1024, device="cuda")) for _ in range(4)]
        del results
        model.train()
"""


def test_an_evaluation_has_a_peak_and_lines_of_its_own(write: Write) -> None:
    """As trainers collect logits: the first step after an evaluation does not hold them."""
    script = write(EVALUATES)
    run = fxmem.run(str(script), until="evaluation")
    assert [step.setup.window for step in run.steps] == ["step 1", "step 2", "step 3"]
    assert [note for note in run.notes if note.startswith("2 more steps are not listed: on inputs")]
    evaluation = run.evaluation
    assert evaluation is not None and evaluation is run.largest
    assert evaluation.setup.window == "evaluation after step 5"
    # The weight, four results and the input of the last; workspaces of forward and backward.
    workspaces = [s.nbytes for s in evaluation.peak.live if s.category is Category.WORKSPACE]
    size = 4 * 1024**2 + 5 * 4096 * 1024 * 4
    assert evaluation.peak_bytes == size + sum(workspaces)
    source = evaluation.peak.source
    assert source is not None and "results = " in script.read_text().splitlines()[source.line - 1]
    assert str(run).startswith(f"Peak {format_bytes(evaluation.peak_bytes)} in evaluation of model")
    assert run.to_dict()["script"]["evaluation"]["name"] == "evaluation after step 5"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_models_do_not_run_again_until_an_evaluation(
    write: Write, device: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Gradients that a script zeroes before its next step are there in an evaluation."""
    script = write(
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.unused = nn.Linear(512, 512), nn.Linear(512, 512)
            def forward(self, x):
                print("a call")
                return {"result": self.used(x), "size": len(x)}
        model = Net().to(sys.argv[1])
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(20):
            optimizer.zero_grad()
            for rows in (8, 8) if step != 15 else (8, 16):
                out = model(torch.randn(rows, 512).to(sys.argv[1]))
                out["result"].square().sum().div(out["size"]).backward()
            optimizer.step()
        with torch.no_grad():
            model.eval()(torch.randn(64, 512).to(sys.argv[1]))
        """
    )
    run = fxmem.run(str(script), [device], device=device, until="evaluation", steps=1)
    # Two of the first step, one of the sizes of another, and the evaluation.
    assert capfd.readouterr().out.count("a call") == 2 + 1 + 1
    evaluation = run.evaluation
    assert evaluation is not None and evaluation.setup.window == "evaluation after step 20"
    assert evaluation.setup.optimizer == "AdamW"  # though the script has ended
    shapes = [s.shape for s in evaluation.peak.live if s.category is Category.GRADIENT]
    assert sorted(map(math.prod, shapes)) == [512, 512 * 512]
    states = [s for s in evaluation.peak.live if s.category is Category.OPTIMIZER_STATE]
    assert len([s for s in states if s.shape == (512, 512)]) == 2


def test_each_of_two_models_gets_its_gradients_until_an_evaluation(write: Write) -> None:
    """A GAN's generator gets none from the discriminator's loss, and then from its own."""
    script = write(
        """
        generator, critic = nn.Linear(256, 256).cuda(), nn.Linear(256, 1).cuda()
        optimizers = [torch.optim.Adam(net.parameters()) for net in (generator, critic)]
        for step in range(12):
            z = torch.randn(8, 256, device="cuda")
            for net, optimizer in zip((critic, generator), reversed(optimizers)):
                optimizer.zero_grad()
                made = generator(z)
                critic(made if net is generator else made.detach()).mean().backward()
                optimizer.step()
        with torch.no_grad():
            generator.eval()(z)
        """
    )
    run = fxmem.run(str(script), until="evaluation")
    evaluation = run.evaluation
    assert evaluation is not None and evaluation.setup.window == "evaluation after step 12"
    shapes = [s.shape for s in evaluation.peak.live if s.category is Category.GRADIENT]
    assert sorted(map(math.prod, shapes)) == [1, 256, 256, 256 * 256]


def test_an_evaluation_before_the_first_step_is_apart_too(write: Write) -> None:
    """As Lightning tries validation first."""
    script = write(
        """
        model = nn.Linear(64, 64).cuda().eval()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.inference_mode():
            model(torch.ones(512, 64, device="cuda"))
        for _ in range(3):
            model.train()(torch.ones(2, 64, device="cuda")).sum().backward()
            optimizer.step()
        """
    )
    run = fxmem.run(str(script))
    names = [window.setup.window for window in run.windows]
    assert names == ["loading", "evaluation before step 1", "step 1", "step 2", "step 3"]


def test_a_model_that_is_not_trained_evaluates_nothing(write: Write) -> None:
    """As a teacher, or DPO's reference: its forward is part of the step."""
    script = write(
        """
        model, teacher = nn.Linear(64, 64).cuda(), nn.Linear(64, 64).cuda().eval()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            x = torch.ones(2, 64, device="cuda")
            with torch.no_grad():
                y = teacher(x)
            (model(x) - y).sum().backward()
            optimizer.step()
        """
    )
    run = fxmem.run(str(script), until="evaluation")
    assert run.evaluation is None and len(run.steps) == 3
    assert "The script ended before an evaluation did." in run.notes


EPOCHS = """
from torch.utils.data import DataLoader

lengths = [2, 3, 2, 9, 2, 3, 2, 20, 2]
loader = DataLoader([torch.ones(8 * n, 64) for n in lengths], batch_size=None)
model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(3):
    for batch in loader:
        model(batch.cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("epoch", epoch)
"""


@pytest.mark.parametrize(
    ("until", "names", "left_out"),
    [
        ("epoch", ["step 1", "step 2", "step 4", "step 8"], 6),  # and a step after it
        (6, ["step 1", "step 2", "step 4"], 3),
    ],
)
def test_larger_steps_of_an_epoch_are_kept(
    write: Write,
    capfd: pytest.CaptureFixture[str],
    until: str | int,
    names: list[str],
    left_out: int,
) -> None:
    run = fxmem.run(str(write(EPOCHS)), until=until, steps=2)
    assert [step.setup.window for step in run.steps] == names
    assert any(note.startswith(f"{left_out} more steps are not listed") for note in run.notes)
    assert capfd.readouterr().out.count("epoch") == (until == "epoch")
    run = fxmem.run(str(write(EPOCHS.replace("range(3)", "range(1)"))), until="epoch", steps=2)
    assert not any("ended before" in note for note in run.notes)
    assert [step.setup.window for step in run.steps] == ["step 1", "step 2", "step 4", "step 8"]


def test_until_names_an_evaluation() -> None:
    with pytest.raises(
        UsageError, match="--until epochs: write evaluation, save, epoch or a number"
    ):
        fxmem.run("train.py", until="epochs")


RESUMES = """
model = nn.Linear(1024, 1024, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
saved = torch.load(sys.argv[1], **PLACE)
is_on_gpu = saved["model"]["weight"].is_cuda and saved["tied"].is_cuda
print(is_on_gpu, torch.cuda.memory_allocated())
model.load_state_dict(saved["model"])
del saved
for _ in range(3):
    model(torch.ones(2, 1024, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("place", "copies"),
    [("{}", 2), ("{'map_location': 'cuda'}", 2), ("{'map_location': {'cuda:0': 'cpu'}}", 1)],
)
def test_a_checkpoint_is_loaded_where_it_was_saved(
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    place: str,
    copies: int,
) -> None:
    """As examples/imagenet/main.py resumes; the weights that two names share are there once."""
    weight = torch.ones(1024, 1024)
    with monkeypatch.context() as patches:
        patches.setattr("torch.serialization.location_tag", lambda _storage: "cuda:0")
        torch.save({"model": {"weight": weight}, "tied": weight.t()}, tmp_path / "saved.pt")
    run = fxmem.run(str(write(RESUMES.replace("PLACE", place))), [str(tmp_path / "saved.pt")])
    size = 1024 * 1024 * 4
    assert capfd.readouterr().out.split() == [str(copies == 2), str(copies * size)]
    assert run.loading is not None and run.loading.peak_bytes == copies * size
    assert [each.setup.window for each in run.windows][:2] == ["loading", "loading"]
    assert size <= min(run.steps[0].profile.live_bytes) < 1.01 * size


def test_a_model_is_saved_as_on_a_gpu_but_not_written(write: Write, tmp_path: Path) -> None:
    """As ``save_pretrained`` of transformers and ``save_state`` of accelerate save."""
    script = write(
        """
        from safetensors.torch import save_file, save_model
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
        model[1].weight = model[0].weight
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            model(torch.ones(2, 64, device="cuda")).sum().backward()
            optimizer.step()
            save_model(model, sys.argv[1])
            save_file({"kept": torch.ones(2)}, sys.argv[1] + ".real")
        """
    )
    path = tmp_path / "model.safetensors"
    run = fxmem.run(str(script), [str(path)])
    assert not path.exists() and path.with_suffix(".safetensors.real").exists()
    assert [note for note in run.notes if note.startswith("safetensors at train.py:")]


PADS = """
def collate(rows):
    return {"x": torch.stack([row[: int(rows[0][0])] for row in rows])}

lengths = [8, 16, 8, 32, 64, 8, 16, 8, 8, 8]
rows = [torch.tensor([length] * 64) for length in lengths for _ in range(2)]
model = nn.Linear(1, 512).to(sys.argv[1])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = torch.utils.data.DataLoader(rows, 2, collate_fn=collate)
if "accelerate" in sys.argv:
    from accelerate import Accelerator
    loader = Accelerator(cpu=sys.argv[1] == "cpu").prepare(loader)
for batch in loader:
    model(batch["x"].to(sys.argv[1]).unsqueeze(-1).float()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("arguments", [["cuda"], ["cuda", "accelerate"], ["cpu"]])
def test_the_fullest_batches_of_a_loader_are_its_steps(write: Write, arguments: list[str]) -> None:
    """Accelerate's loaders draw a batch ahead."""
    run = fxmem.run(str(write(PADS)), arguments, device=arguments[0], fullest=True)
    notes = [note for note in run.notes if "batch" in note or "them" in note]
    assert notes == [
        "Of the loader's 10 batches the fullest is batch 5: x 2x64.",
        "Half of them are no larger than batch 9: x 2x8.",
        "90 % of them are no larger than batch 4: x 2x32.",
        "99 % of them are no larger than batch 4: x 2x32.",
    ]
    numbers = [int(step.setup.window.partition(", batch ")[2].split()[0]) for step in run.steps]
    assert numbers[-1] == 5 and sorted(set(numbers)) == [4, 5, 9]
    sizes = {4: 32, 5: 64, 9: 8}
    for number, step in zip(numbers, run.steps, strict=True):
        assert [s for s in step.graph.storages if s.shape == (2, sizes[number], 512)]


def test_batches_of_one_size_are_said_to_be_so(write: Write) -> None:
    script = write(
        """
        model = nn.Linear(4, 4).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(9):
            for x in torch.utils.data.DataLoader(torch.ones(8, 4), 4):
                model(x.cuda()).sum().backward()
                optimizer.step()
        """
    )
    run = fxmem.run(str(script), fullest=True)
    assert "The loader's 2 batches are all of one size." in run.notes
    assert run.steps[0].setup.window == "step 1, batch 1 of 2"


def test_progress_tells_which_batch_is_read() -> None:
    windows = Windows(None)
    chosen = FullestBatches(windows, lambda batch: batch)
    seen = []

    def read() -> Iterator[torch.Tensor]:
        for size in (1, 2):
            yield torch.ones(size)
            seen.append(windows.describe_running())

    chosen.replace_iteration(lambda _loader: read())(DataLoader([]))
    assert seen == ["batch 1 of the loader", "batch 2 of the loader"]
    assert windows.describe_running() == "step 1"


def test_a_loader_without_batches_is_told(write: Write) -> None:
    script = write("next(iter(torch.utils.data.DataLoader([])))")
    with pytest.raises(TraceError, match="the loader that the steps draw from has no batches"):
        fxmem.run(str(script), fullest=True)


SAVES = """
    from torch.distributed import checkpoint
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for number, x in enumerate(torch.utils.data.DataLoader(torch.ones(48, 512), 8)):
        model(x.cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 4:
            state = {{name: each.clone() for name, each in model.state_dict().items()}}
            {save}
            torch.save(optimizer.state_dict(), "optimizer.pt")
            del state
"""


@pytest.mark.parametrize(
    ("save", "name"),
    [
        ('torch.save(state, "model.pt")', "torch.save"),
        ('checkpoint.save(state, checkpoint_id="saved")', "torch.distributed.checkpoint.save"),
        (
            'checkpoint.async_save(state, checkpoint_id="saved").result()',
            "torch.distributed.checkpoint.async_save",
        ),
    ],
)
def test_saving_is_apart_with_what_it_makes(write: Write, save: str, name: str) -> None:
    run = fxmem.run(str(write(SAVES.format(save=save))), until="save", steps=1)
    assert run.saving is not None and run.saving.setup.window == "saving after step 5"
    model_bytes = 2 * 4 * (512 * 512 + 512)
    peak = run.saving.peak
    live = [s for s in peak.live if s.category is not Category.WORKSPACE and s.nbytes > 512]
    assert sum(each.nbytes for each in live) == 4 * model_bytes  # states, too
    assert peak.phase is Phase.SAVING
    assert any(note.startswith(f"{name} at ") for note in run.notes)
    assert run.to_dict()["script"]["saving"]["peak_bytes"] == run.saving.peak_bytes


def test_a_script_that_saves_in_the_end_saves_after_its_last_step(write: Write) -> None:
    script = write(
        """
        model = nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.ones(8, 64, device="cuda")).sum().backward()
            optimizer.step()
        torch.save(model.state_dict(), "model.pt")
        """
    )
    run = fxmem.run(str(script))
    assert [window.setup.window for window in run.windows] == [
        "loading", "step 1", "step 2", "saving after step 2",
    ]  # fmt: skip


def test_a_script_that_never_saves_is_told(write: Write) -> None:
    trains = "nn.Linear(4, 4).cuda()(torch.ones(4, 4, device='cuda')).sum().backward()"
    script = write(f"{trains}\ntorch.save({{'step': 1}}, __file__ + '.pt')")  # without a tensor
    assert "The script ended before a save did." in fxmem.run(str(script), until="save").notes


VARIES = """
    import random
    texts = [random.Random(number).randint(20, 900) for number in range(24)]
    def pad(batch):
        return torch.ones(len(batch), max(batch), 256)
    loader = torch.utils.data.DataLoader(texts, 4, shuffle=True, collate_fn=pad)
    layers = [nn.Linear(256, 256) if at % 2 else nn.GELU() for at in range(12)]
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(0)
    for epoch in range(3):
        for x in loader:
            optimizer.zero_grad()
            model(x.cuda()).sum().backward()
            optimizer.step()
            print(torch.cuda.memory_reserved())
        break
"""


def test_what_is_reserved_for_a_loader_is_what_its_steps_reserve(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(write(VARIES))
    fullest = fxmem.run(script, fullest=True, gpu="h100")
    found = fullest.fragmentation
    assert [each.steps for each in found] == [6] * 3 and found[0].alloc_conf == ""
    assert str(fullest).count("at the peak") == 2  # one report, though the first step takes less
    capsys.readouterr()
    fxmem.run(script, steps=6, gpu="h100")
    reserved = [int(line) for line in capsys.readouterr().out.splitlines()]
    assert len(reserved) == 6
    assert found[0].reserved_bytes == pytest.approx(reserved[-1], rel=0.05)


def test_nothing_is_replayed_of_batches_that_differ_in_several_sizes(write: Write) -> None:
    script = write(VARIES.replace("torch.ones(len(batch),", "torch.ones(1 + max(batch) % 3,"))
    run = fxmem.run(str(script), fullest=True)
    assert run.fragmentation == () and run.to_dict()["script"]["fragmentation"] == []
    note = (
        "What is reserved after many batches was not computed: they differ in more than one size."
    )
    assert note in run.notes
    on_host = script.read_text().replace(".cuda()", "").replace("torch.cuda.", "torch.cpu.")
    script.write_text(on_host.replace("print(torch.cpu.memory_reserved())", "pass"))
    assert note not in fxmem.run(str(script), device="cpu", fullest=True).notes


@pytest.mark.parametrize("before", ["", "optimizer = make()"])
def test_an_evaluation_before_training_is_no_step(write: Write, before: str) -> None:
    script = write(
        f"""
        model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 8)).cuda()
        def make():
            return torch.optim.Adam(model.parameters())
        {before}
        model.eval()
        with torch.no_grad():
            for _ in range(2):
                model(torch.ones(8192, 64).cuda())
        model.train()
        optimizer = make()
        for _ in range(2):
            model(torch.ones(8, 64).cuda()).sum().backward()
            optimizer.step()
        """
    )
    run = fxmem.run(str(script), steps=2)
    assert [step.setup.window for step in run.steps] == ["step 1", "step 2"]
    assert run.evaluation is not None
    assert run.evaluation.peak_bytes > 8192 * 4096 * 4 > max(s.peak_bytes for s in run.steps)


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


AVERAGES = """
    import copy
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    average = copy.deepcopy(model).eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    def average_rows(rows):
        with torch.no_grad():
            return average(torch.ones(rows, 64).cuda())
    for epoch in range(2):
        for _ in range(2):
            {step}
            model(torch.ones(8, 64).cuda()).sum().backward()
            optimizer.step()
        for _ in range({batches}):
            average_rows(262144)
"""


@pytest.mark.parametrize("until", [None, "evaluation"])
def test_an_average_of_the_weights_is_evaluated(write: Write, until: str | None) -> None:
    """As timm's ``--model-ema`` and ultralytics do."""
    run = fxmem.run(str(write(AVERAGES.format(step="", batches=3))), until=until)
    assert run.evaluation is not None and run.evaluation.setup.window == "evaluation after step 2"
    assert run.evaluation.peak_bytes > 262144 * 64 * 4 > max(s.peak_bytes for s in run.steps)


def test_a_teacher_belongs_to_the_step(write: Write) -> None:
    run = fxmem.run(str(write(AVERAGES.format(step="average_rows(8)", batches=0))))
    assert run.evaluation is None and len(run.steps) == 4 - 1
    assert all("average.0" in {n.fqn for n in step.graph.nodes} for step in run.steps)


def test_what_saving_finds_reserved_is_told_without_an_operator(write: Write) -> None:
    script = write(
        """
        model = nn.Linear(512, 512).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        state = model.state_dict()
        for x in torch.utils.data.DataLoader(torch.ones(24, 512), 8):
            model(x.cuda()).sum().backward()
            optimizer.step()
            torch.save(state, "model.pt")
            torch.save(state, "again.pt")
        """
    )
    for gpu in (None, "t4"):
        run = fxmem.run(str(script), gpu=gpu)
        assert run.saving is not None and len(run.saving.graph.operations) == 1
        assert run.saving.reserved_bytes == run.steps[-1].reserved_bytes > 0
        assert str(run)


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


def test_an_evaluation_may_leave_a_part_in_train(write: Write) -> None:
    script = write(
        """
        body, head = nn.Linear(64, 64).cuda(), nn.Linear(64, 8).cuda()
        optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], 0.1)
        for epoch in range(2):
            body.train()
            head(body(torch.ones(8, 64).cuda())).sum().backward()
            optimizer.step()
            body.eval()
            with torch.no_grad():
                for _ in range(2):
                    head(body(torch.ones(4096, 64).cuda()))
            torch.save(body.state_dict(), "body.pt")
        """
    )
    run = fxmem.run(str(script), steps=2)
    assert [window.setup.window for window in run.windows][2:] == [
        "evaluation after step 1", "saving after step 1", "step 2",
    ]  # fmt: skip
    assert run.evaluation is not None
    assert any(n.fqn.startswith("head") for n in run.evaluation.graph.nodes)
