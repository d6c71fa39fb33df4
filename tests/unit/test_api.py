"""analyze: what it refuses, and in which words; what its arguments change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from running import Call, Runs
from torch import nn

import fxmem
from fxmem.graph import Category

MIB = 2**20


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.linear(x) * scale


FINDS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "nonzero": (lambda y: y[(y > 0).nonzero()[:, 0]], 7),
    "mask": (lambda y: y[y > 0], 7),
    "masked_select": (lambda y: y.masked_select(y > 0), 7),
    "unique": (lambda y: y.detach().unique()[:, None] * y[:1], 7),
    "item": (lambda y: y[: int(y.long().max())], 2),
    "float": (lambda y: y * float(y.max()), 0),
}
"""By name, a function whose result depends on values, and the size to assume."""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "test"}, "unknown mode 'test' (train, infer or generate)"),
        ({"gpu": "h100"}, "gpu='h100' with device='cpu' (leave one of them out)"),
        (
            {"attention": "cudn"},
            "unknown attention 'cudn' (flash or cudnn or efficient or math)",
        ),
        ({"attention": "flash"}, "attention='flash' with device='cpu' (device='cuda')"),
        ({"autocast": "fp32"}, "autocast to float32 (bf16 or fp16)"),
        ({"autocast": torch.float64}, "autocast to float64 (bf16 or fp16)"),
        ({"autocast": "fp16"}, "autocast to float16 is not supported on the CPU (bf16)"),
        ({"autocast": True}, "autocast=True is not a dtype (bf16, fp16, or None)"),
        ({"alloc_conf": ""}, "the allocator's settings are for CUDA (device='cuda')"),
        ({"accumulate": 2.5}, "2.5 micro-batches are not a step (an integer, 1 or more)"),
        ({"accumulate": True}, "True micro-batches are not a step (an integer, 1 or more)"),
        ({"device": "tpu"}, "unknown device 'tpu' (cuda or cpu)"),
        ({"frontend": "jit"}, "unknown frontend 'jit' (fx or record)"),
        *(
            (
                {"size_hint": hint},
                "size_hint must be an integer, 0 or more, got -1 (--size-hint 16)",
            )
            for hint in (-1, {"expert.py:31": -1})
        ),
        (
            {"size_hint": {"a.py": 1}},
            "size_hint: 'a.py' is not a line (FILE:LINE, as expert.py:31)",
        ),
    ],
)
def test_arguments_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(fxmem.UsageError) as raised:
        fxmem.analyze(Net(), ("3x4",), **{"device": "cpu", **settings})
    assert str(raised.value) == message


def test_a_forward_that_raises_is_told_with_its_line() -> None:
    line = Net.forward.__code__.co_firstlineno + 1
    with pytest.raises(fxmem.TraceError) as raised:
        fxmem.analyze(Net(), ("3x5",))
    assert str(raised.value) == (
        f"the step failed at test_api.py:{line}: RuntimeError: a and b must have same reduction "
        "dim, but got [3, 5] X [4, 4]. (check shapes and dtypes of the inputs: 3x5:float32)"
    )


def test_what_the_fx_frontend_cannot_express() -> None:
    with pytest.raises(fxmem.TraceError) as raised:
        fxmem.analyze(Call(lambda x: (x * 2, object())), ("3x4",), mode="infer", frontend="fx")
    reason = "no graph holds the object in the output"
    assert raised.value.cause == f"the fx frontend cannot express this model: {reason}"


def test_a_forced_record_frontend_gives_the_same_numbers() -> None:
    served = fxmem.analyze(Net(), ("3x4",), optimizer="sgd-momentum")
    forced = fxmem.analyze(Net(), "3x4", optimizer="sgd-momentum", frontend="record")
    assert (served.frontend, forced.frontend) == ("fx", "record")
    assert served.graph == forced.graph


@pytest.mark.parametrize(("how", "size"), [(how, size) for how, (_, size) in FINDS.items()])
def test_sizes_that_depend_on_data_need_a_hint(how: str, size: int) -> None:
    find = FINDS[how][0]
    model = Runs(lambda m, x: find(m.linear(x)), linear=nn.Linear(4, 4))
    with pytest.raises(fxmem.DataDependentError, match=r"^`.+` at test_api.py:\d+ needs tensor"):
        # A value that is no size is refused even with a hint.
        fxmem.analyze(model, ("3x4",), size_hint=7 if how == "float" else None)
    if how != "float":
        analysis = fxmem.analyze(model, ("3x4",), size_hint=size)
        output = next(s for s in analysis.graph.storages if s.category is Category.OUTPUT)
        # The result of "item" is a view of what the linear made.
        assert output.shape[0] == size or how == "item"


def test_the_user_s_model_is_left_alone() -> None:
    model = Net().eval()
    model.linear.weight.grad = torch.ones(4, 4)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    fxmem.analyze(model, (torch.ones(3, 4),), optimizer="adam")
    assert not model.training
    assert torch.equal(model.linear.weight.grad, torch.ones(4, 4))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_dtypes_may_be_torch_s() -> None:
    full, half = (fxmem.analyze(Net(), ("3x4",), dtype=dtype) for dtype in (None, "bf16"))
    assert half.parameter_bytes * 2 == full.parameter_bytes
    assert half.input_bytes * 2 == full.input_bytes
    device = torch.device("cuda")
    assert fxmem.analyze(Net(), ("3x4",), dtype=torch.bfloat16, device=device).graph == half.graph
    named, given = (fxmem.analyze(Net(), "3x4", autocast=a) for a in ("bf16", torch.bfloat16))
    assert given.setup.autocast == "bfloat16"
    assert given.peak_bytes == named.peak_bytes != full.peak_bytes


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_the_caller_s_grad_mode_is_no_part_of_the_step(context: Callable[[], Any]) -> None:
    model = Net()
    expected = fxmem.analyze(model, ("3x4",)).graph
    with context():
        assert fxmem.analyze(model, ("3x4",)).graph == expected
        assert not torch.is_grad_enabled()


def test_the_device_is_cuda_or_the_cpu_where_nothing_is_reserved() -> None:
    analysis = fxmem.analyze(nn.Linear(256, 256, bias=False), ("256x256",), mode="infer")
    assert (analysis.setup.device, analysis.gpu) == ("cuda", None)
    # Weight, input and result in a segment of 2 MiB, the workspace of cuBLAS in one of 20 MiB.
    assert analysis.peak_bytes == 3 * 256 * 256 * 4 + 8.125 * MIB
    assert analysis.reserved_bytes == 2 * MIB + 20 * MIB
    assert analysis.process_bytes == (322 * MIB, 622 * MIB)  # with a CUDA context
    analysis = fxmem.analyze(Net(), ("3x4",), mode="infer", device="cpu")
    assert analysis.reserved_bytes == analysis.requested_bytes == analysis.peak_bytes
    assert analysis.process_bytes is None


def test_a_tensor_that_stays_on_the_cpu_fails_as_on_a_gpu() -> None:
    adds = Call(lambda x: x + torch.zeros(4))
    with pytest.raises(fxmem.TraceError) as raised:
        fxmem.analyze(adds, ("3x4",), mode="infer")
    assert raised.value.cause.endswith(
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 "
        "and cpu!"
    )
    assert raised.value.hint == (
        "a tensor is where it was made: give it the device of the others; "
        "--device cpu or device='cpu' if all of it is to run on the CPU"
    )
    assert fxmem.analyze(adds, ("3x4",), mode="infer", device="cpu").peak_bytes > 0


def test_a_compressed_tensor_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("edges", torch.eye(4).to_sparse())
    assert fxmem.analyze(model, ("3x2",)).peak_bytes > 0
    with pytest.warns(UserWarning, match="Sparse CSR tensor support is in beta state"):
        model.edges = torch.eye(4).to_sparse_csr()
    with pytest.raises(
        fxmem.TraceError, match="'edges': tensors of layout sparse_csr are not"
    ) as e:
        fxmem.analyze(model, ("3x2",))
    assert e.value.hint == "use a dense one, or torch.sparse_coo_tensor"


def test_inference_says_what_it_leaves_out() -> None:
    analysis = fxmem.analyze(Net(), ("3x4",), mode="infer", loss="mse", optimizer="adam")
    assert analysis.setup.notes == ("Inference leaves out the loss and the optimizer.",)
    assert fxmem.analyze(Net(), ("3x4",), loss="mse", optimizer="adam").setup.notes == ()


def test_kernels_whose_workspace_only_the_library_knows_are_told_once() -> None:
    model = Call(lambda x: torch.linalg.svdvals(x) + torch.linalg.svdvals(x + 1))
    notes = fxmem.analyze(model, ("8x8",), mode="infer", device="cuda").setup.notes
    assert [note.split(": ")[0] for note in notes] == [
        "Memory inside aten._linalg_svd.default is not counted"
    ]


def test_completion_lists_the_functions_that_are_loaded_on_first_use() -> None:
    assert set(fxmem.__all__) <= set(dir(fxmem))
