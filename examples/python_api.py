"""The same analysis from Python: the model, its inputs, and the numbers as attributes.

python examples/python_api.py
"""

from __future__ import annotations

from torch import nn

import fxmem
from fxmem.units import format_bytes


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4096, 1024))


def main() -> None:
    model = build_model()
    for batch in (64, 512, 4096):
        analysis = fxmem.analyze(model, (f"{batch}x1024",), optimizer="adam")
        peak = format_bytes(analysis.peak_bytes)
        saved = format_bytes(analysis.saved_bytes)
        print(f"batch {batch}: peak {peak} in {analysis.peak.phase.value}, {saved} saved")

    print("alive at the last peak:")
    for storage in analysis.peak.live[:5]:
        print(f"  {format_bytes(storage.nbytes):>10}  {storage.category.value:15}  {storage.name}")


if __name__ == "__main__":
    main()
