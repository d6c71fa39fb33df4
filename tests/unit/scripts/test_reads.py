"""What a script may do with values that nobody knows: it ends, and gets plausible ones."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import fxmem
from fxmem import ScriptRun

Run = Callable[..., ScriptRun]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(text: str, **options: object) -> ScriptRun:
        path = tmp_path / "train.py"
        path.write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(text))
        return fxmem.run(str(path), **options)  # type: ignore[arg-type]

    return run


# transformers.GenerationMixin._sample, with its StoppingCriteriaList
GENERATE = """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100)).to(device)
    tokens = torch.full((4, 7), 5).to(device)
    unfinished = torch.ones(4, dtype=torch.long, device=device)
    end = torch.tensor([2], device=device)
    while True:
        scores = model(tokens)[:, -1]
        chosen = {choose} * unfinished + (1 - unfinished)
        tokens = torch.cat([tokens, chosen[:, None]], -1)
        is_done = torch.full((4,), False, device=device, dtype=torch.bool)
        is_done = is_done | torch.full((4,), tokens.shape[1] >= 12, device=device)
        is_done = is_done | torch.isin(tokens[:, -1], end)
        unfinished = unfinished & ~is_done
        if unfinished.max() == 0:
            break
    print(tokens.shape)
    model(tokens).sum().backward()
"""


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("choose", ["scores.argmax(-1)", "scores.softmax(-1).multinomial(1)[:, 0]"])
def test_text_is_generated_to_its_greatest_length(
    run: Run, capsys: pytest.CaptureFixture[str], device: str, choose: str
) -> None:
    run(GENERATE.format(choose=choose), device=device)
    assert capsys.readouterr().out == "torch.Size([4, 12])\n"
