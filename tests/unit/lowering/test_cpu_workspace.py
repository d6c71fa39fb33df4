"""The estimates equal what the CPU profiler sees inside the real kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map_only

from fxmem.lowering import onednn
from fxmem.lowering.cpu_workspace import estimate_workspace_bytes

aten = torch.ops.aten

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(onednn.library() is None, reason="oneDNN cannot be asked for its layouts"),
]


def new_bytes(outputs: object) -> int:
    """Bytes of the outputs' storages."""
    if isinstance(outputs, Tensor):
        return outputs.untyped_storage().nbytes()
    if isinstance(outputs, (tuple, list)):
        return sum(map(new_bytes, outputs))
    return 0


def measure(call: Callable[[], object]) -> tuple[int, object]:
    """Bytes beyond the outputs at the peak of a second call, and the outputs."""
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        call()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            outputs = call()
    result = profiler.profiler
    assert result is not None and result.kineto_results is not None
    events = [e for e in result.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return max(0, peak - new_bytes(outputs)), outputs


def check(func: OpOverload, *args: object, **kwargs: object) -> object:
    """Assert that the estimate from fake tensors is what the real kernel needs."""
    measured, outputs = measure(lambda: func(*args, **kwargs))
    with FakeTensorMode() as mode, torch.no_grad():
        fakes, fake_kwargs = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
        fake_outputs = func(*fakes, **fake_kwargs)
    predicted = estimate_workspace_bytes(func, fakes, fake_kwargs, fake_outputs)
    assert predicted == measured
    return outputs


def check_convolution(
    sizes: tuple[int, ...],
    channels: int,
    kernel: int,
    *,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    transposed: bool = False,
    bias: bool = True,
    memory_format: torch.memory_format = torch.contiguous_format,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Check a convolution forward and backward, with several output masks."""
    spatial = len(sizes) - 2
    inner, outer = (channels // groups, sizes[1]) if transposed else (sizes[1] // groups, channels)
    input_ = torch.randn(sizes).to(dtype, memory_format=memory_format)
    weight = torch.randn(outer, inner, *[kernel] * spatial).to(dtype)
    vector = torch.randn(channels).to(dtype) if bias else None
    geometry = ([stride] * spatial, [padding] * spatial, [dilation] * spatial)
    rest = (*geometry, transposed, [0] * spatial, groups)
    output = check(aten.convolution.default, input_, weight, vector, *rest)
    assert isinstance(output, Tensor)
    gradient = torch.randn_like(output)
    sizes_of_bias = [channels] if bias else None
    for mask in ([True, True, bias], [False, True, bias], [True, False, False]):
        check(
            aten.convolution_backward.default,
            gradient, input_, weight, sizes_of_bias, *rest, mask,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
class TestConvolution2d:
    def test_stem(self, batch: int, memory_format: torch.memory_format, dtype: torch.dtype) -> None:
        check_convolution(
            (batch, 3, 32, 32), 32, 7, stride=2, padding=3, bias=False,
            memory_format=memory_format, dtype=dtype,
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("channels", "kernel", "options"),
        [
            (32, 3, {"padding": 1}),
            (24, 1, {}),
            (32, 1, {"stride": 2}),
            (16, 3, {"groups": 16}),
            (16, 3, {"groups": 4}),
            (16, 3, {"padding": 2, "dilation": 2}),
            (8, 2, {"stride": 2, "transposed": True}),
        ],
    )
    def test_block(
        self,
        channels: int,
        kernel: int,
        options: dict[str, int],
        batch: int,
        memory_format: torch.memory_format,
        dtype: torch.dtype,
    ) -> None:
        check_convolution(
            (batch, 16, 14, 14), channels, kernel, **options,  # type: ignore[arg-type]
            memory_format=memory_format, dtype=dtype,
        )  # fmt: skip


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [(2, 16, 20), (1, 16, 20), (2, 3, 6, 6, 6), (1, 3, 6, 6, 6)])
def test_convolution_1d_and_3d(sizes: tuple[int, ...], transposed: bool) -> None:
    check_convolution(sizes, 8, 3, transposed=transposed)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"groups": 2}, {"dilation": 2}, {"transposed": True}, {"bias": False}]
)
def test_convolution_without_mkldnn(options: dict[str, int], batch: int) -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        check_convolution((batch, 4, 10, 10), 8, 3, **options)  # type: ignore[arg-type]
        check_convolution((batch, 4, 5, 6, 7), 8, 3, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [1, 2])
def test_convolution_follows_the_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_convolution((2, 16, 14, 14), 32, 1)
        check_convolution((2, 32, 14, 14), 32, 3, padding=1)
    finally:
        torch.set_num_threads(before)
