"""The batches of a script's own loader."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from sample_nets.scripts import Write
from torch.utils.data import DataLoader

import fxmem
from fxmem import TraceError
from fxmem.scripts.batches import FullestBatches
from fxmem.scripts.windows import Windows

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
