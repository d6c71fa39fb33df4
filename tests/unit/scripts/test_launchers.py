"""Launchers: one of the processes that a command line or a script starts is the one that runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fxmem
from benchmarks.cases import import_torchvision
from fxmem import TraceError, UsageError

Write = Callable[[str], str]
TRAIN = """
import json, os, sys
import torch, torch.distributed as dist
from torch import nn

def train(place, *args):
    model = nn.Linear(8, 8).cuda(place)
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        optimizer.step()

def note(**values):
    with open(os.path.join(os.path.dirname(__file__), "notes.json"), "a") as file:
        print(json.dumps(values), file=file)
"""
TOLD = """
note(arguments=sys.argv[1:], gpus=torch.cuda.device_count(), variables=dict(os.environ))
train(0)
"""
VARIABLES = ("RANK", "WORLD_SIZE", "ROLE_", "GROUP_", "LOCAL_", "MASTER_ADDR", "TORCH", "OMP")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> str:
        (tmp_path / "train.py").write_text(TRAIN + textwrap.dedent(text))
        return str(tmp_path / "train.py")

    return write


def read_notes(script: str) -> list[dict[str, Any]]:
    lines = (Path(script).parent / "notes.json").read_text().splitlines()
    return [json.loads(line) for line in lines]


def run_line(line: str, **options: Any) -> fxmem.ScriptRun:
    program, *arguments = line.split()
    return fxmem.run(program, arguments, **options)


@pytest.mark.parametrize(
    ("line", "rank", "expected"),
    [
        ("torchrun --nproc-per-node 4 --nnodes=2 {} --lr 1", 6, (["--lr", "1"], 4, "6", "2", "8")),
        ("torchrun --standalone --nproc_per_node=4 {}", 0, ([], 4, "0", "0", "4")),
        ("python -u -W ignore -m torch.distributed.run {} -x", 0, (["-x"], 1, "0", "0", "1")),
        ("A=1 B= python3.11 {}", 0, ([], 1, None, None, None)),
    ],
)
def test_a_launch_line_is_one_process_of_it(
    write: Write, line: str, rank: int, expected: tuple[Any, ...]
) -> None:
    script = write(TOLD)
    run = run_line(line.format(script), rank=rank)
    assert run.largest.setup.model == "train.py"
    (told,) = read_notes(script)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    variables = [told["variables"].get(name) for name in names]
    assert (told["arguments"], told["gpus"], *variables) == expected
    assert ("A" in told["variables"]) == line.startswith("A=1")
    assert not {"A", "RANK", "TORCHELASTIC_RUN_ID"} & {*os.environ}


@pytest.mark.slow
def test_variables_are_those_that_torchrun_sets(write: Write) -> None:
    script = write("note(variables=dict(os.environ)); torch.cuda.is_available() and train(0)")
    line = f"--nproc-per-node 2 --role trainer --max-restarts 3 {script}"
    run_line(f"torchrun {line}", rank=1)
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    subprocess.run([*torchrun, *line.split()], check=True, capture_output=True, timeout=120)
    ours, *real = [
        {k: v for k, v in note["variables"].items() if k.startswith(VARIABLES)}
        for note in read_notes(script)
    ]
    theirs = next(variables for variables in real if variables["RANK"] == "1")
    for name in ("ERROR_FILE", "SIGNALS_TO_HANDLE", "RUN_ID", "USE_AGENT_STORE"):
        for variables in (ours, theirs):  # the agent's own, and a random number
            variables.pop(f"TORCHELASTIC_{name}", None)
    assert ours == theirs


@pytest.mark.parametrize(
    "start",
    [
        "mp.spawn(join, args=(4,), nprocs=4)",
        "mp.start_processes(join, (4,), 4, start_method='fork', join=False).join()",
        # As in PyTorch's tutorial "Writing Distributed Applications".
        """
        starts = [mp.Process(target=main, args=(rank, 4)) for rank in range(4)]
        [process.start() for process in starts]
        [process.join() for process in starts]
        assert [process.exitcode for process in starts] == [0] * 4
        """,
    ],
)
def test_one_of_the_processes_that_a_script_starts_runs_here(write: Write, start: str) -> None:
    text = """
    import torch.multiprocessing as mp

    def join(rank, size):
        dist.init_process_group("nccl", rank=rank, world_size=size)
        note(rank=dist.get_rank(), size=dist.get_world_size())
        train(rank)

    def main(rank, size):
        join(rank, size)

    if __name__ == "__main__":
    """
    script = write(textwrap.dedent(text) + textwrap.indent(textwrap.dedent(start), "    "))
    run = fxmem.run(script, rank=2, steps=9)
    assert read_notes(script) == [{"rank": 2, "size": 4}]
    assert "COMMUNICATION" in str(run.steps[1].breakdown)
    with pytest.raises(UsageError, match="rank 4"):
        fxmem.run(script, rank=4)


def test_a_process_that_shares_the_model_runs_here(write: Write) -> None:
    """As in the example mnist_hogwild of pytorch/examples."""
    script = write("""
        import torch.multiprocessing as mp

        def work(rank, model):
            note(rank=rank)
            model(torch.ones(2, 8, device="cuda")).sum().backward()

        model = nn.Linear(8, 8).to("cuda")
        assert model.share_memory() is model and torch.ones(2).share_memory_().is_shared()
        spawning = mp.get_context("spawn")
        workers = [spawning.Process(target=work, args=(rank, model)) for rank in range(2)]
        [worker.start() for worker in workers]
        [worker.join() for worker in workers]
    """)
    assert fxmem.run(script, steps=1).largest.breakdown[fxmem.Category.GRADIENT]
    assert read_notes(script) == [{"rank": 0}]


def test_other_processes_of_a_script_are_started(write: Write) -> None:
    text = """
    import multiprocessing, subprocess

    def fetch(queue):
        queue.put(os.getpid())

    queue = multiprocessing.get_context("fork").Queue()
    process = multiprocessing.get_context("fork").Process(target=fetch, args=(queue,))
    process.start()
    fetched = queue.get()
    process.join()
    said = subprocess.run(["echo", "1"], env=os.environ.copy(), capture_output=True).stdout
    # As Lightning starts the processes of the other ranks.
    other = subprocess.Popen(["no such program"], env={**os.environ, "LOCAL_RANK": "1"})
    note(own=fetched == os.getpid(), said=said.decode(), other=other.wait())
    train(0)
    """
    script = write(text)
    fxmem.run(script, world_size=1)
    assert read_notes(script) == [{"own": False, "said": "1\n", "other": 0}]


@pytest.mark.parametrize(("device", "there"), [("cuda", True), ("cpu", False)])
def test_nvidia_smi_is_there_where_a_gpu_is(write: Write, device: str, there: bool) -> None:
    text = """
    import shutil, subprocess

    found = shutil.which("nvidia-smi")
    if found:
        subprocess.check_output("nvidia-smi", shell=True)
    note(found=bool(found))
    nn.Linear(8, 8).to("cuda" if torch.cuda.is_available() else "cpu")
    """
    script = write(text)
    fxmem.run(script, device=device)
    assert read_notes(script) == [{"found": there or bool(shutil.which("nvidia-smi"))}]


def test_accelerate_prepares_its_environment(write: Write, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    import_torchvision()  # accelerate looks for it
    script = write(TOLD)
    (tmp_path / "config.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 3\n")
    lines = (
        f"accelerate launch --num_processes 2 --mixed_precision bf16 {script}",
        f"accelerate-launch --num_processes 1 --mixed_precision fp16 {script} --lr 1",
        f"python -m accelerate.commands.launch --config_file {tmp_path}/config.yaml {script}",
    )
    for line in lines:
        run_line(line)
    told = [note["variables"] for note in read_notes(script)]
    assert [each.get("WORLD_SIZE") for each in told] == ["2", None, "3"]
    assert [each["ACCELERATE_MIXED_PRECISION"] for each in told] == ["bf16", "fp16", "no"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Lightning's, on workers, samplers and epochs
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "fsdp"])
def test_lightning_trains_on_one_of_its_devices(write: Write, strategy: str) -> None:
    import_torchvision()  # Lightning looks for it
    pytest.importorskip("lightning")
    script = write(f"""
    import lightning
    from torch.utils.data import DataLoader

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(512, 1024)

        def training_step(self, batch):
            self.log("loss", loss := self.layer(batch).sum(), sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters())

    silent = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = lightning.Trainer(devices=4, num_nodes=2, strategy={strategy!r}, **silent)
    note(rank=trainer.global_rank, size=trainer.world_size)
    trainer.fit(Module(), DataLoader(torch.randn(4096, 512), batch_size=16))
    """)
    run = fxmem.run(script)
    assert read_notes(script) == [{"rank": 0, "size": 8}]
    share = 8 if strategy == "fsdp" else 1
    assert run.steps[1].gradient_bytes * share == 4 * 1024 * 513


def test_lines_that_cannot_be_run_are_explained(write: Write) -> None:
    script = write("")
    for line, cause in (
        ("srun -n 4 python train.py", "no script 'srun'"),
        ("torchrun --nproc-per-node 4 nowhere.py", "no script 'nowhere.py'"),
        (f"deepspeed {script}", "DeepSpeed is not analysed"),
        ("python -m deepspeed.launcher.runner train.py", "DeepSpeed is not analysed"),
        ("python", "no script ''"),
    ):
        with pytest.raises(UsageError, match=cause):
            run_line(line)
    with pytest.raises(TraceError, match="torchrun ended with exit code 2"):
        run_line("torchrun --no-such-option")
    with pytest.raises(UsageError, match=r"train.py started no process of rank 3"):
        fxmem.run(write("train(0)"), rank=3)


def test_warnings_of_torch_show_the_script_s_line(write: Write) -> None:
    script = write("""
        places = torch.zeros(1, 3, dtype=torch.long, device="cuda")
        weight = torch.ones(3, device="cuda", requires_grad=True)
        torch.sparse_coo_tensor(places, weight, (4,)).to_dense().sum().backward()
    """)
    shown: list[tuple[str, int]] = []
    torch.set_warn_always(True)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *call, **_: shown.append((call[2], call[3]))
        fxmem.run(script)
    torch.set_warn_always(False)
    line = next(
        at for at, text in enumerate(Path(script).read_text().splitlines(), 1) if "coo" in text
    )
    assert (script, line) in shown
    assert not any("fxmem" in os.path.dirname(name) for name, _ in shown)
