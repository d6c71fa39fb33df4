"""The recorder: storages, operators, nodes and saved tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fxmem.fakes.fake_mode import make_fake_mode
from fxmem.graph import NEXT_RESULT, RESIDENT, Category
from fxmem.kernels.cuda import CUDA
from fxmem.kernels.cuda.gpu import Gpu
from fxmem.kernels.cuda.present_gpu import show_gpu
from fxmem.kernels.registry import Backend
from fxmem.recording.ledger import NO_STORAGE
from fxmem.recording.recorder import Recorder
from fxmem.recording.saves import watch_saved


@contextlib.contextmanager
def record(target: Backend | None = None) -> Iterator[Recorder]:
    """A recorder in the middle of a step."""
    recorder = Recorder(target or Backend("cpu"))
    with make_fake_mode(), recorder:
        recorder.begin_step()
        yield recorder


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with record() as recorder:
        yield recorder


def test_a_storage_lives_from_its_operator_to_the_last_holder(recorder: Recorder) -> None:
    x = torch.zeros(4)
    y = x.exp()
    view = y[1:]
    del y
    z = view.sin()
    del view
    z.cos_()
    assert [o.name for o in recorder.operations] == [
        "step.begin",
        "aten.zeros.default",
        "aten.exp.default",
        "aten.slice.Tensor",
        "aten.sin.default",
        "aten.cos_.default",
    ]
    assert [(s.nbytes, s.born, s.died) for s in recorder.ledger.storages] == [
        (16, 1, None),
        (16, 2, 4),
        (12, 4, None),
    ]
    assert recorder.ledger.live_bytes == [16, 32, 44, 28]
    del x, z


def test_a_stranger_was_there_all_the_time() -> None:
    recorder = Recorder(Backend("cpu"))
    with make_fake_mode() as mode, recorder:
        recorder.begin_step()
        x = torch.zeros(4)
        with torch.utils._mode_utils.no_dispatch():
            real = torch.ones(8)
        y = x.sum() + mode.from_tensor(real)
    stranger = next(s for s in recorder.ledger.storages if s.nbytes == 32)
    assert stranger.born == RESIDENT
    assert recorder.ledger.resident_bytes == 32
    assert recorder.ledger.live_bytes == [48, 52, 84, 80, 48]
    del y


def test_workspace_rises_and_falls_within_its_operator() -> None:
    target = Backend("cpu")
    target.workspace(torch.ops.aten.exp.default)(lambda *_: 100)
    with record(target) as recorder:
        x = torch.zeros(4)
        y = x.exp()
    assert recorder.ledger.live_bytes == [16, 32, 132, 32]
    assert recorder.operations[-1].workspace_bytes == 100
    del y


def test_blocks_and_results_come_in_the_order_of_the_kernel() -> None:
    target = Backend("cpu")
    # A block that goes before the second result, which comes before the first; then another block.
    blocks = ((0, 100), (0, -100), (~1, 0), (~0, 0), (1, 7), (1, -7))
    target.workspace(torch.ops.aten.max.dim)(lambda *_: blocks)
    with record(target) as recorder:
        x = torch.zeros(4, 2)
        y = x.max(0)
    assert recorder.ledger.live_bytes == [32, 132, 32, 48, 56, 63, 56]
    assert recorder.operations[-1].blocks == (
        (0, 100),
        (0, -100),
        (NEXT_RESULT, 0),
        (NEXT_RESULT, 0),
        (1, 7),
        (1, -7),
    )
    assert recorder.operations[-1].workspace_bytes == 100 - (8 + 16)
    del y


@pytest.mark.parametrize(
    "function", [torch.sigmoid, torch.exp, torch.sqrt, lambda x: x.softmax(-1)]
)
def test_an_output_that_its_own_operator_saves_dies_with_it(
    recorder: Recorder, function: Any
) -> None:
    """A pack hook that returns its tensor would keep such an output in a cycle."""
    x = torch.zeros(4, requires_grad=True)
    with watch_saved(recorder):
        y = function(x)
    died = len(recorder.operations) - 1
    del y
    assert recorder.ledger.storages[1].died == died


def test_only_what_is_alive_is_resident() -> None:
    recorder = Recorder(Backend("cpu"))
    with make_fake_mode(), recorder:
        output, cache, gone = torch.zeros(4), torch.zeros(2), torch.zeros(8)
        recorder.label(output, Category.OUTPUT, "output")
        del gone
        recorder.begin_step()
    assert [(s.nbytes, s.born, s.category, s.name) for s in recorder.ledger.storages] == [
        (16, RESIDENT, Category.OUTPUT, "output of the step before"),
        (8, RESIDENT, Category.BUFFER, "kept from the step before"),
    ]
    assert recorder.ledger.resident_bytes == 24
    assert recorder.ledger.warmup == [(0, 16), (1, 8), (-3, 32), (-3, -32)]
    del output, cache


def test_what_a_library_keeps_is_there_once_for_each_thread() -> None:
    target = Backend("cpu")
    target.keeper(torch.ops.aten.exp.default)(lambda args: (("its workspace", 100),))
    recorder = Recorder(target)
    with make_fake_mode(), recorder:
        x = torch.zeros(4, requires_grad=True)
        y = x * 2
        y.register_hook(torch.exp)  # run by the autograd engine
        x.exp()
        torch.autograd.grad(y.sum(), x)
        recorder.begin_step()
        x.exp()
    kept = [s for s in recorder.ledger.storages if s.name == "its workspace"]
    assert [(s.nbytes, s.category, s.born, s.died) for s in kept] == [
        (100, Category.WORKSPACE, RESIDENT, None)
    ] * 2
    assert recorder.ledger.resident_bytes == 232  # x and y


def test_another_device_s_tensors_are_not_counted() -> None:
    with record(CUDA) as recorder:
        host = torch.zeros(1000)
        on_gpu = torch.zeros(2, device=CUDA.device)
        assert recorder.track(host) == NO_STORAGE != recorder.track(on_gpu)
    assert recorder.ledger.live_bytes == [8]


def test_kernels_of_the_warm_up_hold_their_workspaces() -> None:
    recorder = Recorder(CUDA)
    x = torch.empty(2, 3, 8, 8)
    with make_fake_mode(), recorder:
        strided = x.to(CUDA.device).transpose(2, 3)[:, :, ::2]
        torch.nn.functional.conv2d(strided, torch.zeros(4, 3, 3, 3, device=CUDA.device))
    copy_bytes, result_bytes = 4 * 2 * 3 * 4 * 8, 4 * 2 * 4 * 2 * 6
    weight_bytes = 4 * 4 * 3 * 3 * 3
    own_bytes = copy_bytes + result_bytes + weight_bytes  # all three in channels last
    assert recorder.ledger.history[2:5] == [(2, copy_bytes), (3, result_bytes), (4, own_bytes)]
    assert {(2, -copy_bytes), (4, -own_bytes)} <= {*recorder.ledger.history[5:]}


def test_blocks_of_the_warm_up_have_names_of_their_own() -> None:
    recorder = Recorder(CUDA)
    with make_fake_mode(), recorder:
        y = torch.zeros(1024, 1024, device=CUDA.device).sum()
        recorder.begin_step()
    # Reduce.cuh: the sum, partial sums of 128 blocks, a semaphore; then the input goes.
    assert recorder.ledger.warmup == [
        (-1, 4 << 20),
        (0, 4),
        (-3, 512),
        (-4, 4),
        (-4, -4),
        (-3, -512),
        (-1, -(4 << 20)),
    ]
    del y


def test_storages_and_workspaces_are_those_of_the_current_stream() -> None:
    target = Backend("cuda")
    target.workspace(torch.ops.aten.exp.default)(lambda *_: 64)
    target.keeper(torch.ops.aten.exp.default)(lambda args: (("its workspace", 100),))
    recorder = Recorder(target)
    with show_gpu(Gpu()), make_fake_mode(), recorder:
        x, side = torch.zeros(4, device=CUDA.device), torch.cuda.Stream(stream_id=7)
        with torch.cuda.stream(side):
            kept = x.exp()
            x.exp()  # gone before the step
            recorder.begin_step()
            made = kept.exp()
        made.exp()
    storages = recorder.ledger.storages
    assert [s.stream for s in storages if s.name != "its workspace"] == [0, 7, 7, 0]
    # Of a library's memory, each stream has its own.
    assert [s.stream for s in storages if s.name == "its workspace"] == [7, 0]
    assert [operation.stream for operation in recorder.operations] == [0, 7, 0]
    gone = [change for change in recorder.ledger.warmup if change[0] is None or change[0] < 0]
    assert sorted(nbytes for _, nbytes in gone) == [-64, -64, -16, 16, 64, 64]
    assert recorder.ledger.warmup_streams == tuple((name, 7) for name, n in gone if n > 0)
