"""One convolution in half precision over very wide inputs."""

from __future__ import annotations

from torch import Tensor, nn

import fxmem
from benchmarks.published.cases import Case
from benchmarks.published.predicting import find_allocated_after, list_peaks

CHANNELS, HEIGHT = 256, 2048


class Convolution(nn.Module):
    """A 3x3 convolution, while the input of the width before is still there."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        """From one input of shape (1, channels, height, width) to an output of that shape."""
        return self.conv(x)


def predict(case: Case) -> dict[str, int]:
    """Reserved memory after a call, before the cache is emptied, and what is still allocated."""
    width, before = case.config["width"], case.config["width_before"]
    analysis = fxmem.analyze(
        f"{__name__}:Convolution",
        (
            fxmem.TensorSpec((1, CHANNELS, HEIGHT, width), "float16"),
            fxmem.TensorSpec((1, CHANNELS, HEIGHT, before), "float16"),
        ),
        mode="infer",
        dtype="float16",
        alloc_conf="",
    )
    kept = CHANNELS * HEIGHT * before * 2
    return {
        "allocated after forward": find_allocated_after(analysis, ()) - kept,
        "reserved": list_peaks(analysis, first=True)["reserved"],
    }
