"""Steps of one rank under the plain wrappers: what is resident, and what its buffers take."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import fxmem
from fxmem.errors import TraceError
from fxmem.graph import Category

BLOCKS, WIDTH, RANKS, MIB = 3, 32, 8, 1 << 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 5)  # five rows on eight ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BLOCK_NUMEL = sum(parameter.numel() for parameter in Block().parameters())
HEAD_NUMEL = 5 * WIDTH + 5


def analyze(parallelize: Any, device: str = "cpu", **options: Any) -> fxmem.Analysis:
    fixed: dict[str, Any] = {"device": device, "loss": "mse", "optimizer": "adam", **options}
    return fxmem.analyze(Net(), f"4x{WIDTH}", mesh={"dp": RANKS}, parallelize=parallelize, **fixed)


on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard needs a GPU in this release"
)


@on_cpu
def test_shards_of_each_rank() -> None:
    model = Net()
    for rank, rows in ((0, 1), (7, 0)):  # the head's rows are padded to one on each rank
        analysis = fxmem.analyze(
            model, f"4x{WIDTH}", mesh={"dp": RANKS}, parallelize="fsdp", rank=rank, device="cpu"
        )
        numel = BLOCKS * BLOCK_NUMEL // RANKS + (WIDTH + 1)
        assert analysis.parameter_bytes == 4 * numel, rows
        assert analysis.setup.rank == rank
    assert type(model.blocks[0]) is Block
    assert not model.blocks[0]._forward_pre_hooks


@on_cpu
def test_buffers_of_fully_shard() -> None:
    analysis = analyze("fsdp")
    gathered = [
        storage.nbytes
        for storage in analysis.graph.storages
        if storage.category is Category.COMMUNICATION and storage.name == "allgather_base"
    ]
    # Forward gathers the root and each block, backward the blocks again but for the last, which is
    # prefetched too: the root keeps its parameters.
    assert gathered.count(4 * BLOCK_NUMEL) == 2 * BLOCKS
    assert gathered.count(4 * RANKS * (WIDTH + 1)) == 1
    unsharded = [s for s in analysis.graph.storages if s.name == "blocks.0.up.weight (unsharded)"]
    assert [storage.nbytes for storage in unsharded] == 2 * [4 * 4 * WIDTH * WIDTH]
    assert all(storage.died is not None for storage in unsharded)


def test_buffers_of_fully_shard_are_on_streams_of_its_own() -> None:
    """``FSDPCommContext.lazy_init``: urgent streams for copying in, gathering and reducing."""
    streams: dict[str, set[int]] = {}
    for storage in analyze("fsdp", "cuda").graph.storages:
        streams.setdefault(storage.name, set()).add(storage.stream)
    assert streams["allgather_base"] == {33} and streams["blocks.1.up.weight.grad"] == {35}
    assert streams["blocks.0.up.weight (unsharded)"] == streams["head.weight"] == {0}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_buckets_of_data_parallel(device: str) -> None:
    analysis = analyze("ddp", device)
    numel = BLOCKS * BLOCK_NUMEL + HEAD_NUMEL
    buckets = [s for s in analysis.graph.storages if s.category is Category.COMMUNICATION]
    assert sum(bucket.nbytes for bucket in buckets) >= 4 * numel
    assert analysis.parameter_bytes >= 4 * numel


@pytest.mark.filterwarnings("ignore:.torch.jit")  # in torch.distributed.optim
def test_a_zero_redundancy_optimizer_holds_the_state_of_its_rank() -> None:
    def make_optimizer(parameters: Any) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1, momentum=0.9)

    layout: Any = {"mesh": {"dp": 2}, "parallelize": "ddp"}
    analysis = fxmem.analyze(nn.Linear(8, 4), "2x8", optimizer=make_optimizer, **layout)
    state = [s for s in analysis.graph.storages if s.category is Category.OPTIMIZER_STATE]
    assert [s.name for s in state] == ["module.weight.momentum_buffer"]  # rank 1 has the bias's


def test_tensor_parallel_steps_make_no_tensors_of_global_shapes() -> None:
    def split(model: nn.Module, mesh: Any) -> None:
        ways = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        parallelize_module(model, mesh, ways)

    analysis = fxmem.analyze(Net(), f"40x{WIDTH}", mesh={"tp": 2}, parallelize=split, loss="mse")
    assert not [s for s in analysis.graph.storages if s.shape == (40, 4 * WIDTH)]


def test_lists_of_other_wrappers_run_as_the_wrapper_has_them() -> None:
    """As in the optimizer's step where torchao's weights are shards."""
    with fxmem.record(device="cpu") as recording:
        parts = (torch.zeros(4, device="cpu") for _ in range(2))
        torch._foreach_add_([TwoTensor(*parts)], 1)
    assert [each.name for each in recording.steps[0].graph.operations].count(
        "aten._foreach_add_.Scalar"
    ) == 2


def test_the_rank_with_the_highest_peak() -> None:
    worst = fxmem.analyze(
        Net(), f"4x{WIDTH}", mesh={"dp": RANKS}, parallelize="fsdp", rank="worst", optimizer="adam"
    )
    assert worst.setup.rank == 0  # it has a row of the head, whose state the last rank lacks
    assert worst.setup.notes[-1].startswith("Of the ranks compared, 5 has the lowest peak: ")


def build_in_a_group() -> nn.Module:
    torch.distributed.init_process_group("nccl")
    return nn.Linear(4, 4 * torch.distributed.get_world_size())


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_factory_that_joins_a_group(world_size: int) -> None:
    layout: Any = {"mesh": {"dp": 4}, "parallelize": "ddp"} if world_size == 4 else {}
    analysis = fxmem.analyze(f"{__file__}:build_in_a_group", "2x4", **layout)
    assert analysis.parameter_bytes >= 4 * 20 * world_size
    assert not torch.distributed.is_initialized()


def test_communication_of_replicated_shards() -> None:
    fixed: dict[str, Any] = {"loss": "mse", "parallelize": "fsdp", "gpu": "t4"}
    analysis = fxmem.analyze(Net(), f"4x{WIDTH}", mesh={"replicate": 2, "shard": 4}, **fixed)
    sent = dict.fromkeys([("replicate",), ("shard",)], 0)
    for operation in analysis.graph.operations:
        if operation.group:
            sent[operation.group] += operation.communication_bytes
    blocks, head = 4 * BLOCKS * BLOCK_NUMEL, 4 * 4 * 2 * (WIDTH + 1)  # the head's rows padded to 8
    gathered, reduced = 2 * blocks + head, blocks + head
    assert sent["shard",] == (gathered + reduced) * 3 // 4
    assert sent["replicate",] == reduced // 4  # twice, one half each
    least, most = analysis.context_bytes
    assert (least, most) == (MIB * (300 + 2 * 256), MIB * (600 + 2 * 1536))
    assert analysis.process_bytes == (
        least + analysis.reserved_bytes,
        most + analysis.reserved_bytes,
    )


def test_gathering_is_one_node() -> None:
    names = [node.name for node in analyze("fsdp", "cuda").graph.nodes]
    assert names[:4] == ["x", "all_gather", "blocks.0.all_gather", "blocks.0.up"]


def test_compilers_can_be_left_out_of_a_layout() -> None:
    def compile_blocks(model: Any, mesh: Any) -> Any:
        model.blocks[0].compile()
        model.blocks[1] = torch.compile(model.blocks[1])
        return nn.parallel.DistributedDataParallel(model)

    analysis = analyze(compile_blocks, compile=False)
    assert analysis.peak_bytes == analyze("ddp").peak_bytes
    assert "torch.compile was left out: the figures are of eager mode." in analysis.setup.notes


def test_gradients_are_compressed_by_a_hook_that_needs_nccl() -> None:
    def compress(model: Any, mesh: Any) -> Any:
        wrapped = nn.parallel.DistributedDataParallel(model)
        wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
        return wrapped

    graph = analyze(compress).graph
    assert "bfloat16" in {s.dtype for s in graph.storages if s.category is Category.COMMUNICATION}


def test_synchronised_normalisation_is_refused() -> None:
    def synchronise(model: Any, mesh: Any) -> Any:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return nn.parallel.DistributedDataParallel(model)

    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with pytest.raises(TraceError, match="SyncBatchNorm is not analysed"):
        fxmem.analyze(model, "4x8", mesh={"dp": 2}, parallelize=synchronise)


def test_buckets_made_under_a_side_stream_are_not_used_again() -> None:
    """As Lightning's DDPStrategy makes them, and a script or function may."""

    def wrap(model: Any, mesh: Any) -> Any:
        return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())

    def wrap_aside(model: Any, mesh: Any) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            return wrap(model, mesh)

    def reserve(parallelize: Any) -> tuple[int, int]:
        layers = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
        fixed: dict[str, Any] = {"mesh": {"dp": RANKS}, "optimizer": "adam", "loop": "lightning"}
        analysis = fxmem.analyze(layers, "4x1024", parallelize=parallelize, **fixed)
        return analysis.peak_bytes, analysis.reserved_bytes

    plain, aside = reserve(wrap), reserve("ddp")
    assert aside == reserve(wrap_aside)
    assert aside[0] == plain[0] and aside[1] - plain[1] > 8 * 1024**2 * 4 * 0.9


def test_flat_parameters_are_sharded_and_gathered_within_checkpoints() -> None:
    """Of the kind that runs backward within backward, as transformers 4 takes by default."""

    def flatten(model: Net, mesh: Any) -> nn.Module:
        for block in [*model.blocks][1:]:  # the first one's input needs no gradient
            run = functools.partial(checkpoint, block.forward, use_reentrant=True)
            block.forward = run  # type: ignore[method-assign]
        policy = ModuleWrapPolicy([Block])
        return FSDP(model, device_mesh=mesh, auto_wrap_policy=policy, device_id=0)

    analysis = analyze(flatten, "cuda")
    shards_bytes = 4 * (BLOCKS * -(-BLOCK_NUMEL // RANKS) + -(-HEAD_NUMEL // RANKS))
    assert shards_bytes <= analysis.parameter_bytes == analysis.gradient_bytes < shards_bytes + 512
