"""Loading, resuming and saving in scripts, apart from their steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sample_nets.scripts import Write

import fxmem
from benchmarks.scripts import measure_script
from fxmem import Category, Phase


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


# Early stopping reloads the best, as examples/imagenet copies it and FairSeq replaces the last.
RELOADS = """
import io, os, shutil
from pathlib import Path
folder = Path(sys.argv[1])
model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).to(device)
model[1].weight = model[0].weight
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(3):
    model(torch.ones(8, 256, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if epoch == 1:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(saved, folder / "new.pt")
        del saved
        (folder / "new.pt").replace(folder / "last.pt")
        shutil.copy2(folder / "last.pt", folder / "best.pt")
        assert os.path.getsize(folder / "last.pt") > 0 and not os.path.exists(folder / "new.pt")
        os.remove(folder / "last.pt")
        assert not (folder / "last.pt").exists()
        loaded = torch.load(folder / "best.pt", map_location=PLACE)
        assert loaded["epoch"] == 1 and loaded["model"]["0.weight"].device.type == PLACE
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        best = torch.load(buffer, weights_only=False)
"""


def test_what_was_saved_is_loaded_again(write: Write, tmp_path: Path) -> None:
    """Tied weights are there once; what was loaded lives on beside the model."""
    text = 'device = "cpu"' + RELOADS.replace("PLACE", '"cpu"')
    script, own = write(text), tmp_path / "best.pt"
    own.write_text("of an earlier run")
    run = fxmem.run(str(script), [str(tmp_path)], device="cpu")
    assert own.read_text() == "of an earlier run" and not (tmp_path / "last.pt").exists()
    assert [step.peak_bytes for step in run.steps] == measure_script(
        str(script), [str(tmp_path)], 3
    )


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_what_was_saved_is_loaded_where_it_is_wanted(
    write: Write, tmp_path: Path, place: str
) -> None:
    text = 'device = "cuda"' + RELOADS.replace("PLACE", f'"{place}"')
    run = fxmem.run(str(write(text)), [str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    live = [s for s in run.steps[2].peak.live if s.nbytes == 256 * 256 * 4]
    # The weight, two gradients and their sum, two states and the copy's weight; the one loaded.
    assert len(live) == (7 if place == "cpu" else 8)


def test_safetensors_are_loaded_again(write: Write, tmp_path: Path) -> None:
    """As transformers' ``Trainer(load_best_model_at_end=True)`` does."""
    script = write(
        """
        from safetensors.torch import load_file, save_file
        model = nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            model(torch.ones(2, 64, device="cuda")).sum().backward()
            optimizer.step()
            save_file(model.state_dict(), sys.argv[1])
            assert not load_file(sys.argv[1])["weight"].is_cuda
            model.load_state_dict(load_file(sys.argv[1], device="cuda"))
        """
    )
    run = fxmem.run(str(script), [str(tmp_path / "model.safetensors")])
    assert len(run.steps) == 3 and not (tmp_path / "model.safetensors").exists()


KEEPS = {
    # sklearn's wrappers, queues of processes
    "pickle": "saved = pickle.loads(pickle.dumps(model.state_dict()))['weight']",
    # torchvision's tutorials, with an attribute of a tensor of the host
    "a module": """
class Tag: pass
model.kept = torch.zeros(3)
model.kept.tag = Tag()
torch.save(model, path)
model = torch.load(path, weights_only=False)
assert isinstance(model.kept.tag, Tag) and model.weight.requires_grad
saved = model.weight.detach()
""",
    # adapters, as kohya's scripts and diffusers read them
    "safe_open": """
import safetensors
from safetensors.torch import save_file
save_file(model.state_dict(), path, metadata={"format": "pt"})
with safetensors.safe_open(path, framework="pt") as file:
    assert file.metadata() == {"format": "pt"} and set(file.keys()) == {"weight", "bias"}
    saved = file.get_tensor("weight")
""",
    "bytes": """
from safetensors.torch import load, save
saved = load(save({"weight": model.weight.detach()}))["weight"]
""",
    "a distributed checkpoint": """
from torch.distributed import checkpoint
checkpoint.save(model.state_dict(), checkpoint_id=path)
loaded = model.state_dict()
checkpoint.load(loaded, checkpoint_id=path)
saved = loaded["weight"]
""",
    "a shallow copy": "saved = copy.copy(model.weight.detach())",
}


@pytest.mark.parametrize("form", KEEPS)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_ways_to_keep_weights(write: Write, tmp_path: Path, form: str, device: str) -> None:
    text = f"""
import pickle
path = sys.argv[1]
model = nn.Linear(64, 32).to("{device}")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(8, 64, device="{device}")).sum().backward()
optimizer.step()
{KEEPS[form]}
assert saved.shape == (32, 64) and saved.dtype == torch.float32
"""
    run = fxmem.run(str(write(text)), [str(tmp_path / "saved")], device=device)
    assert run.steps and not (tmp_path / "saved").exists()
