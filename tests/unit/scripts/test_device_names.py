"""Devices as scripts write them: each form takes the memory that the plainest one takes."""

from __future__ import annotations

from pathlib import Path

import pytest

import fxmem
from benchmarks.scripts import measure_script

STEPS = """
optimizer = torch.optim.Adam(model.parameters())
assert all(p.is_cuda and p.device == torch.device("cuda:0") for p in model.parameters())
for step in range(2):
    x = torch.randn(64, 512, device="cuda")
    assert x.type() == "torch.cuda.FloatTensor"
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PLAIN = "model = nn.Linear(512, 512).cuda()"
FORMS = {
    "a device by its number": "model = nn.Linear(512, 512).to(torch.device(0))",
    "a number": "model = nn.Linear(512, 512).to(0)",
    "a factory's number": "model = nn.Linear(512, 512, device=0)",
    # accelerate, and fully_shard of a model built on the host
    "the data of parameters": """
model = nn.Linear(512, 512)
for p in model.parameters():
    p.tag = "kept"
    p.data = p.data.to("cuda")
assert model.weight.tag == "kept" and isinstance(model.weight, nn.Parameter)
""",
    # nerf-pytorch
    "a default type": """
torch.set_default_tensor_type("torch.cuda.FloatTensor")
model = nn.Linear(512, 512)
assert torch.Tensor([[1.0, 2.0]]).is_cuda and torch.Tensor(2, 3).is_cuda
torch.set_default_tensor_type("torch.FloatTensor")
""",
    "safetensors": """
from safetensors.torch import load_file, save_file
save_file({k: v.contiguous() for k, v in nn.Linear(512, 512).state_dict().items()}, "w.safetensors")
model = nn.Linear(512, 512, device="meta")
model.load_state_dict(load_file("w.safetensors", device="cuda"), assign=True)
load_file("w.safetensors", device=0)
""",
    # transformers' from_pretrained loads weights so
    "a pool of threads": """
from concurrent.futures import ThreadPoolExecutor
model = nn.Linear(512, 512)
with ThreadPoolExecutor(4) as pool:
    moved = pool.map(lambda pair: (pair[0], pair[1].to("cuda")), model.state_dict().items())
    model.load_state_dict(dict(moved), assign=True)
""",
    # bitsandbytes reads the first name as it is imported, transformers the second
    "names of a build for CUDA": """
from torch._C import _cuda_getCurrentRawStream as get_stream
assert get_stream(0) == torch.cuda.current_stream(device=torch.device("cuda")).cuda_stream
assert int(torch.version.cuda.split(".")[0]) >= 12
assert torch.backends.cudnn.version() > 90000
model = nn.Linear(512, 512).cuda()
""",
    "pinned memory": """
model = nn.Linear(512, 512)
pinned = {k: torch.empty(v.shape, pin_memory=True) for k, v in model.state_dict().items()}
model.load_state_dict({k: v.to("cuda", non_blocking=True) for k, v in pinned.items()}, assign=True)
""",
}


def run_steps(folder: Path, text: str) -> list[tuple[int, int]]:
    path = folder / "train.py"
    path.write_text(f"import torch\nfrom torch import nn\n{text}\n{STEPS}")
    run = fxmem.run(str(path), steps=2)
    return [(step.peak_bytes, step.parameter_bytes) for step in run.steps][1:]


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_devices(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_steps(tmp_path, FORMS[form]) == run_steps(tmp_path, PLAIN)


PREFETCHING = """
import queue, threading
model = nn.Linear(512, 512).cuda()
batches, is_ahead = queue.Queue(1), threading.Event()

def prefetch():
    stream = torch.cuda.Stream()
    for number in range(4):
        with torch.cuda.stream(stream):
            batch = torch.ones(64, 512, device="cuda"), torch.ones(64, 512).cuda()
        if number == 2:
            is_ahead.set()
        batches.put(batch)
        del batch

threading.Thread(target=prefetch, daemon=True).start()
one, other = batches.get()
assert one.is_cuda and other.device == torch.device("cuda", 0)
assert torch.cuda.current_stream() == torch.cuda.default_stream()
del one, other
is_ahead.wait()
"""


def test_a_prefetching_thread(tmp_path: Path) -> None:
    peak_bytes, parameter_bytes = run_steps(tmp_path, PREFETCHING)[0]
    plain_bytes, plain_parameter_bytes = run_steps(tmp_path, PLAIN)[0]
    assert parameter_bytes == plain_parameter_bytes
    # Of two batches of two tensors each, the thread holds one that waits and one in the queue.
    assert peak_bytes - plain_bytes == 2 * 2 * 64 * 512 * 4


RANK = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, _random, randn
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (2,))
_random.manual_seed(0, mesh)
objects, gathered, own = ["mine"], [None, None], [None]
dist.broadcast_object_list(objects, src=0)
dist.all_gather_object(gathered, dist.get_rank())
dist.monitored_barrier(dist.new_group(backend="gloo"))
dist.scatter_object_list(own, ["first", "second"])
assert (objects, gathered, own) == (["mine"], [1, 1], ["second"])
model = nn.Linear(512, 512).cuda()
plan = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
parallelize_module(model, mesh, plan)
nn.init.normal_(model.weight)
assert randn((64, 512), device_mesh=mesh, placements=[Shard(0)]).to_local().shape == (32, 512)
optimizer = torch.optim.Adam(model.parameters())
for step in range(2):
    x, y = torch.randn(64, 512, device="cuda"), torch.zeros(64, dtype=torch.long, device="cuda")
    with loss_parallel():
        nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_devices_that_pytorch_names_on_a_rank(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(RANK)
    run = fxmem.run(str(path), steps=2, world_size=2, rank=1)
    assert run.steps[1].parameter_bytes == (512 * 512 + 512) * 4 // 2


TRANSFORMS = """
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, vmap
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
parameters, x = dict(model.named_parameters()), torch.randn(128, 3, device=device)
optimizer = torch.optim.Adam(model.parameters())

def compute(parameters, x):
    return functional_call(model, parameters, x).sum()

for step in range(3):
    slope = vmap(grad(compute, argnums=1), (None, 0))(parameters, x)
    curve = vmap(jacrev(grad(compute, argnums=1), argnums=1), (None, 0))(parameters, x)
    (slope.square().sum() + curve.square().sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_transforms_of_functions(tmp_path: Path) -> None:
    """As physics-informed networks differentiate; PyTorch's transforms refuse hooks on saves."""
    path = tmp_path / "train.py"
    path.write_text(TRANSFORMS)
    assert [step.peak_bytes for step in fxmem.run(str(path), device="cpu").steps] == measure_script(
        str(path), [], 3
    )


EXPANDED = """
import torch
from torch import nn
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    call_for_per_sample_grads(model)(torch.randn(32, 64, device=device)).square().sum().backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad_sample.mean(0)
        del parameter.grad_sample
    optimizer.step()
    optimizer.zero_grad()
"""


def test_gradients_of_each_sample(tmp_path: Path) -> None:
    """As Opacus' ``grad_sample_mode="ew"``: weights of a class that takes few functions."""
    path = tmp_path / "train.py"
    path.write_text(EXPANDED)
    assert len(fxmem.run(str(path)).steps) == 3
    assert [step.peak_bytes for step in fxmem.run(str(path), device="cpu").steps] == measure_script(
        str(path), [], 3
    )


def test_graphs_are_refused_at_their_line(tmp_path: Path) -> None:
    text = "torch.cuda.CUDAGraph | None\nwith torch.cuda.graph(torch.cuda.CUDAGraph()):\n    pass"
    with pytest.raises(fxmem.TraceError, match=r"^CUDA graphs at .*train.py:4 are not modelled"):
        run_steps(tmp_path, text)
