"""The decoder of a sound."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any


class AudioDecoder:
    """The samples of a file or its bytes, as torchcodec gives them."""

    def __init__(self, source: Any, sample_rate: int | None = None, **_: Any) -> None:
        import soundfile
        import torch

        file = io.BytesIO(source) if isinstance(source, bytes) else source
        samples, self.rate = soundfile.read(file, dtype="float32", always_2d=True)
        self._data = torch.from_numpy(samples.T)
        self.metadata = SimpleNamespace(sample_rate=self.rate)

    def get_all_samples(self) -> Any:
        """Returns all samples, by channel."""
        return SimpleNamespace(data=self._data, sample_rate=self.rate)

    def get_samples_played_in_range(self, start: float = 0, stop: float | None = None) -> Any:
        """Returns the samples between two seconds, by channel."""
        end = None if stop is None else int(stop * self.rate)
        data = self._data[:, int(start * self.rate) : end]
        return SimpleNamespace(data=data, sample_rate=self.rate)


class VideoDecoder:
    """Nothing: ``datasets`` imports the name."""
