"""Time and memory that analyses take: the largest Llama, and the first analysis in a process.

    python -m benchmarks.large [--against DIRECTORY] [--rounds 3]

Each figure comes from a process of its own. With `--against`, a second source tree (an older
commit's work tree) takes turns with this one, so that both meet the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from tabulate import tabulate

HERE = Path(__file__).parent.parent
LLAMA = """
import torch, transformers
config = transformers.LlamaConfig(
    vocab_size=128_256, hidden_size=16_384, intermediate_size=53_248, num_hidden_layers=126,
    num_attention_heads=128, num_key_value_heads=8, max_position_embeddings=131_072,
    use_cache=False,
)
with torch.device("meta"):
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
ids = fxmem.TensorSpec((1, 8192), "int64")
analyze = lambda: fxmem.analyze(
    model, (), {"input_ids": ids, "labels": ids}, optimizer="adamw", gpu="h100"
)
"""
RESNET = """
import torchvision
model = torchvision.models.resnet50()
analyze = lambda: fxmem.analyze(model, ("8x3x224x224",), optimizer="sgd")
"""
MEASURE = """
import json, resource, sys, time
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
seconds = []
for _ in range(int(sys.argv[1])):
    start = time.perf_counter()
    peak_bytes = analyze().peak_bytes
    seconds.append(time.perf_counter() - start)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"peak": peak_bytes, "seconds": seconds, "rss": after, "added": after - before}))
"""
CASES = {"Llama 405B, bf16, AdamW, 1x8192": (LLAMA, 1), "ResNet-50, SGD, 8x3x224x224": (RESNET, 3)}


def measure(tree: Path, setting: str, calls: int) -> dict[str, Any]:
    """Runs analyses in a process of its own: their seconds, the peak, KiB held and added."""
    code = "from benchmarks.cases import import_torchvision; import_torchvision()\n"
    code += f"import fxmem\n{setting}\n{MEASURE}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(calls)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        check=True,
        text=True,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Prints a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="an older work tree")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    trees = [HERE] if options.against is None else [HERE, options.against.resolve()]
    rows = []
    for name, (setting, calls) in CASES.items():
        found: dict[Path, list[dict[str, Any]]] = {tree: [] for tree in trees}
        for _ in range(options.rounds):
            for tree in trees:
                found[tree].append(measure(tree, setting, calls))
        for tree, results in found.items():
            calls_s = zip(*(result["seconds"] for result in results), strict=True)
            times = ", ".join(f"{statistics.median(column):.2f} s" for column in calls_s)
            sizes = (statistics.median(r[key] for r in results) for key in ("rss", "added"))
            which = "this tree" if tree == HERE else str(tree)
            held = (f"{size // 1024} MiB" for size in sizes)
            rows.append([name, which, times, *held, results[0]["peak"]])
    headers = ["analysis", "tree", "calls", "process", "added by analyses", "peak in bytes"]
    print(tabulate(rows, headers))


if __name__ == "__main__":
    main()
