"""Liger-Kernel's benchmarks under ``fxmem run``, against the memory that it has published of them.

A folder holds a checkout of each commit, named by the commit: the one that added the figures to
``benchmark/data/all_benchmark_data.csv``. Needs ``triton``. Figures are in MiB, as published.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.stamp import write_stamp

_KIB = 1 / 1024
_FLUSHED_BYTES = 256 * 1024**2
"""What ``triton.testing.do_bench`` clears before each call."""


@dataclass(frozen=True)
class Benchmark:
    """A script of ``benchmark/scripts`` at a commit, and the GPU that it ran on."""

    commit: str
    name: str
    gpu: str
    gpu_name: str  # as the figures have it


_A100, _H100 = ("a100-80gb", "NVIDIA A100-SXM4-80GB"), ("h100", "NVIDIA H100 80GB HBM3")
_PCIE, _3090 = ("h100-pcie", "NVIDIA H100 PCIe"), ("rtx3090", "NVIDIA GeForce RTX 3090")
_4090, _B200 = ("rtx4090", "NVIDIA GeForce RTX 4090"), ("b200", "NVIDIA B200")
_RUNS = {
    "b5672a153b": (_A100, "cross_entropy embedding geglu layer_norm rms_norm rope swiglu"),
    "a307eac8b0": (_PCIE, "kl_div"),
    "6817c2d34d": (_PCIE, "jsd"),
    "ff6650bbce": (_H100, "fused_linear_jsd"),
    "6b2fd02d57": (_A100, "orpo_loss"),
    "16d06edf4f": (_A100, "cpo_loss"),
    "ebd5303530": (_A100, "simpo_loss"),
    "90fb5e4a3c": (_A100, "fused_linear_cross_entropy"),
    "aa2d23dc7f": (_H100, "distill_jsd_loss"),
    "ee5aaf26b9": (_H100, "kto_loss"),
    "e71b1e4347": (_3090, "sparsemax"),
    "5d25e46827": (_3090, "softmax multi_token_attention sparse_multi_token_attention"),
    "a53675ddeb": (_3090, "fused_neighborhood_attention"),
    "08906d3d9c": (_A100, "distill_cosine_loss"),
    "6a2c49130e": (_H100, "layer_norm"),
    "10b6cdec8f": (_H100, "llama4_rope"),
    "78125679ab": (_A100, "grpo_loss"),
    "4c32ab6a48": (_4090, "tiled_mlp"),
    "dea3a772e1": (_B200, "group_norm"),
    "5c9cecc85c": (_H100, "tvd"),
    "39a1f454f3": (_H100, "relu_squared"),
    "b7025a7027": (_H100, "fused_add_rms_norm"),
    "1faa0131db": (_H100, "fused_moe"),
    "8ef203a42d": (_B200, "jsd"),
}
BENCHMARKS = tuple(
    Benchmark(commit, name, *gpu)
    for commit, (gpu, names) in _RUNS.items()
    for name in names.split()
)
"""Each at the commit that added its figures, as far as the scripts take one process."""

_CAUSES = """
- `embedding`: 12,240 MiB more there in all sizes, then 13,770, also of `huggingface`. In the torch
  2.4 of these figures, compiled modules stay in cycles until Python's collector runs (seen on the
  CPU; not in 2.13): the embeddings of 4,096 columns, whose speed was measured before, take that.
- `sparsemax` of `liger`: the figures are those of `torch`, to the KiB.
- `multi_token_attention`: 0.7 to 1.1 MiB more there in all sizes, also of `torch`. cuDNN may take
  them for its convolution, which is not counted; not shown. The sparse one calls `sparsemax`.
- `fused_moe` of `huggingface`: each expert's mask is taken to select all tokens, since outside of a
  module no router is assumed. `kto_loss` of `huggingface` selects by random labels; not verified.
- `fused_linear_grpo_loss`: 2,068 MiB less there in all sizes. Inductor of torch 2.13 fails on one
  of its graphs (`produce_guards`), and what it was given stays; alone, the first size is equal.
- `orpo_loss`, `cpo_loss`, `simpo_loss`: 2,083 or 2,084 MiB more there in all sizes, also of
  `huggingface`. 2,084.05 are, to the KiB, what one call of `liger` with two chunks holds: weight,
  input, their gradients, a chunk, targets and loss. In torch 2.5 the first calls that compile stay
  in cycles until Python's collector runs (2.5.1 on the CPU: those of two and four sequences).
- `kto_loss` of `liger`: 510 MiB more there, and 1,268 from the second size on. Not found.
- `fused_linear_cross_entropy` of `liger`: about a chunk of logits more there (31.3 MiB for 4,096
  tokens, and in proportion) than the source at that commit allocates. Not found.
"""

Key = tuple[str, str, str, float, str]
"""Kernel, provider, mode, the size that varies, and the other sizes."""


def read_figures(source: Path, gpu_name: str) -> dict[Key, float]:
    """Reads the published figures of a GPU."""
    with (source / "benchmark/data/all_benchmark_data.csv").open() as file:
        return {
            (
                *(row["kernel_name"], row["kernel_provider"], row["kernel_operation_mode"]),
                *(float(row["x_value"]), row["extra_benchmark_config_str"]),
            ): float(row["y_value_50"])
            for row in csv.DictReader(file)
            if row["metric_name"] == "memory" and row["gpu_name"] == gpu_name
        }


def predict(benchmark: Benchmark, source: Path) -> dict[Key, float]:
    """Runs a script with all its providers and sizes, and returns what it would have written."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        inner = ["--measure", str(source), benchmark.name, str(out)]
        # As fxmem run, without its report on a step of all calls.
        call = f"{__file__!r}, {inner!r}, gpu={benchmark.gpu!r}, steps=10**6"
        # transformers, which some scripts compare with, looks for torchvision.
        first = "from benchmarks.cases import import_torchvision; import_torchvision()"
        code = f"{first}; import fxmem; fxmem.run({call})"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if not out.exists():
            raise RuntimeError(done.stderr[-2000:])
        return {tuple(key): figure for key, figure in json.loads(out.read_text())}


def measure(source: Path, name: str, out: Path) -> None:
    """Runs a script as its authors did, its timings first, and writes down its figures.

    Its kernels are imported one by one: the packages around them want the transformers of their
    time.
    """
    import torch
    import triton.testing

    for package in ("liger_kernel", "liger_kernel.transformers"):
        module = sys.modules[package] = ModuleType(package)
        module.__path__ = [str(source / "src" / package.replace(".", "/"))]
    sys.path[:0] = [str(source / "benchmark/scripts"), str(source)]  # some import their tests
    sys.modules.pop("test", None)  # of Python
    import utils  # type: ignore[import-not-found] # of the scripts

    def time_calls(
        call: Any, *_: Any, quantiles: Any = (), grad_to_none: Any = (), **__: Any
    ) -> Any:
        call()
        flushed = torch.empty(_FLUSHED_BYTES // 4, dtype=torch.int32, device="cuda")
        for tensor in grad_to_none or ():
            tensor.grad = None
        call()
        del flushed
        return [1.0] * len(quantiles) if quantiles else 1.0

    figures: list[tuple[Key, float]] = []

    def keep(benchmark_data_list: Any, **_: Any) -> None:
        for result in benchmark_data_list:
            if result.metric_name == "memory":
                what = result.kernel_name, result.kernel_provider, result.kernel_operation_mode
                for size, figure in zip(result.x_values, result.y_values_50, strict=True):
                    key = (*what, float(size), result.extra_benchmark_config_str)
                    figures.append((key, float(figure)))

    triton.testing.do_bench, utils.update_benchmark_data_csv = time_calls, keep
    script = f"benchmark_{name}.py"
    sys.argv = [script]
    os.chdir(source / "benchmark/scripts")
    runpy.run_path(script, run_name="__main__")
    out.write_text(json.dumps(figures))


def make_page(sources: Path) -> Iterator[str]:
    """Makes the page of all scripts whose sources are there."""
    yield "# Kernels in Triton\n"
    yield f"{write_stamp('python -m benchmarks.triton_kernels --sources DIR')}\n"
    yield (
        "[Liger-Kernel](https://github.com/linkedin/Liger-Kernel) has published what"
        " `torch.cuda.max_memory_allocated()` was\nfor its kernels in Triton, and for those of"
        " PyTorch and Hugging Face beside them. Its benchmark scripts ran here at the\ncommits"
        " that added the figures, with `fxmem run`, without a GPU.\n"
    )
    yield "| kernels | of | GPU | mode | figures, MiB | equal to the KiB | at most off by |"
    yield "| - | - | - | - | - | - | - |"
    count = equal = near = 0
    failed: list[str] = []
    for benchmark in BENCHMARKS:
        source = sources / benchmark.commit
        if not source.is_dir():
            continue
        published = read_figures(source, benchmark.gpu_name)
        groups: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
        try:
            predicted = predict(benchmark, source)
        except RuntimeError as error:
            failed.append(f"- {benchmark.name} at {benchmark.commit}: {_read_cause(error)}")
            continue
        if not predicted.keys() & published.keys():
            failed.append(f"- {benchmark.name} at {benchmark.commit}: it has other sizes.")
        for key, figure in predicted.items():
            if key in published:
                groups.setdefault(key[:3], []).append((published[key], figure))
        for (kernel, provider, mode), pairs in groups.items():
            # A figure is a float32, which has 24 bits.
            same = sum(abs(a - b) <= max(_KIB, a * 2**-23) for a, b in pairs)
            near += sum(abs(a - b) <= 0.01 * a for a, b in pairs)
            worst = max((b / a - 1 for a, b in pairs if a), key=abs, default=0.0)
            off = "" if same == len(pairs) else f"{worst:+.2%}"
            span = f"{min(a for a, _ in pairs):,.1f} to {max(a for a, _ in pairs):,.1f}"
            link = f"[{kernel}](https://github.com/linkedin/Liger-Kernel/tree/{benchmark.commit})"
            row = link, provider, benchmark.gpu_name, mode, span, f"{same} of {len(pairs)}", off
            yield f"| {' | '.join(row)} |"
            count, equal = count + len(pairs), equal + same
    yield f"\nOf {count} figures {equal} are equal, {near} within 1 %. The others:\n{_CAUSES}"
    yield "Scripts whose figures are not compared:\n"
    yield from failed


def _read_cause(error: RuntimeError) -> str:
    """The last line that the script wrote."""
    return str(error).strip().splitlines()[-1].partition(": ")[2].partition(" (see the")[0]


def main() -> None:
    """Runs all, or what ``fxmem run`` is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=Path, help="folder of checkouts, named by commit")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        source, name, out = options.measure
        measure(Path(source), name, Path(out))
    else:
        for line in make_page(options.sources):
            print(line, flush=True)


if __name__ == "__main__":
    main()
