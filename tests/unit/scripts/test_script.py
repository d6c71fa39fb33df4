"""Training scripts as people write them, run where no GPU is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_nets.scripts import MODEL, Write
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fxmem
from benchmarks.scripts import measure_script, predict_script
from fxmem import Category, FxmemError, Phase, ScriptRun, TraceError, UsageError
from fxmem.graph import RESIDENT
from fxmem.units import format_bytes

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


def test_an_optimizer_that_comes_later_is_told(write: Write) -> None:
    """As physics-informed networks are trained: by Adam, and then by L-BFGS."""
    script = write("""
        model = make_model().cuda()
        adam = torch.optim.Adam(model.parameters())
        lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=2)

        def closure():
            loss = model(torch.randn(2, 3, 32, 32).cuda()).sum()
            loss.backward()
            return loss

        for step in range(4):
            closure()
            adam.step()
        lbfgs.step(closure)
    """)
    late = "LBFGS did not step in what was recorded: --steps N records N steps."
    assert late in fxmem.run(str(script)).notes
    run = fxmem.run(str(script), steps=5)
    assert late not in run.notes and run.largest.setup.window == "step 5"


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
        class Lazy(dict):
            def items(self):  # as transformers' maps of models
                raise RuntimeError("loads every model")
        models = Lazy(model=net)
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
            "flex_attention at train.py:13 does not run on tensors without data",
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
