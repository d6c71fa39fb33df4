"""Evaluations of scripts, apart from their steps."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from sample_nets.scripts import Write

import fxmem
from fxmem import Category, Phase, UsageError
from fxmem.units import format_bytes


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


def test_what_is_logged_after_a_step_begins_no_other(write: Write) -> None:
    """As milesial's U-Net logs the norms of weights before it evaluates."""
    script = write("""
        model = make_model().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(5):
            model.train()
            model(torch.randn(2, 3, 32, 32).cuda()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            total = sum(weight.norm().item() for weight in model.parameters())
            model.eval()
            with torch.inference_mode():
                model(torch.randn(8, 3, 32, 32).cuda())
    """)
    run = fxmem.run(str(script), until="evaluation")
    assert run.find_largest(Phase.EVALUATION) is not None
