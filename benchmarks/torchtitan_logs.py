"""torchtitan's own training script at past commits, against the memory in its published logs.

The sources are not here: a folder holds a checkout of each commit, named by the commit. Data and
tokenizers are made up. Needs ``datasets``, ``tiktoken``, ``torchdata``, ``sentencepiece``,
``tensorboard``, ``triton`` and, for float8, ``torchao==0.8``, which the script imports.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
_LLAMA3 = (
    " --job.config_file {config} --model.tokenizer_path {data}/llama3.model"
    " --training.dataset c4_test --metrics.log_freq 1"
)
_SCRIPT = "train.py" + _LLAMA3.replace("{config}", "train_configs/llama3_8b.toml")
_MODULE = "-m torchtitan.train" + _LLAMA3.replace(
    "{config}", "torchtitan/models/llama/train_configs/llama3_8b.toml"
)
_LLAMA2 = (
    "train.py --job.config_file train_configs/llama_7b.toml"
    " --model.tokenizer_path {data}/llama2.model --training.dataset minipile"
    " --training.dataset_path {data}/minipile --metrics.log_freq 1 --activation_checkpoint.mode "
)
_LLAMA = "torchtitan/models/llama/__init__.py"
_PARALLELIZE = "torchtrain/parallelisms/parallelize_llama.py"
_CHUNKED = ((_LLAMA, "cross_entropy_loss", "chunked_cross_entropy_loss"),)
_NEWER_TORCH = (
    (_PARALLELIZE, "torch.ops.c10d_functional", "torch.ops._c10d_functional"),
    (
        _PARALLELIZE,
        "_pt2_selective_checkpoint_context_fn_gen, checkpoint",
        "create_selective_checkpoint_contexts as _pt2_selective_checkpoint_context_fn_gen"
        ", checkpoint",
    ),
    (_PARALLELIZE, "def _custom_policy(mode, func", "def _custom_policy(context, func"),
    (_PARALLELIZE, 'f"{mode}_mm_count"', 'f"{context.is_recompute}_mm_count"'),
)
"""Two private names of torch, and the policy's arguments, as torch has them today."""


@dataclass(frozen=True)
class Run:
    """A launch, and the most of a step that was published of it, in GiB.

    Attributes:
        reserved: Of the first step, and of later ones; None where a step was not published.
        active: As ``reserved``.
        edits: Files, what was there, and what replaces it.
        settings: Of CUDA's allocator.
        world_size: How many GPUs.
    """

    name: str
    commit: str
    command: str
    reserved: tuple[float | None, float | None]
    active: tuple[float | None, float | None] = (None, None)
    edits: tuple[tuple[str, str, str], ...] = ()
    settings: str = "expandable_segments:True"
    world_size: int = 8

    def list_published(self) -> Iterator[tuple[str, float, str, int]]:
        """Lists figures: what each is, how much, and its name and step in a report."""
        steps = ("first step", "later steps")
        for what, key in (("reserved", "reserved_bytes"), ("active", "peak_bytes")):
            for index, published in enumerate(getattr(self, what)):
                if published is not None:
                    yield f"{self.name}, {steps[index]}, {what}", published, key, index


_COMPILE = " --training.compile"
_FLOAT8 = (
    _COMPILE
    + " --float8.enable_float8_linear --float8.enable_fsdp_float8_all_gather"
    + " --float8.precompute_float8_dynamic_scale_for_fsdp"
)
_PAIRS = _SCRIPT + " --training.batch_size 2"
_POLICY = _SCRIPT + " --training.fsdp_reshard_after_forward "
RUNS = (
    Run("5940ddeb5, reshard default", "5940ddeb5", _POLICY + "default", (42.08, 49.59)),
    Run("5940ddeb5, reshard always", "5940ddeb5", _POLICY + "always", (41.89, 49.41)),
    Run("5940ddeb5, reshard never", "5940ddeb5", _POLICY + "never", (54.66, 62.18)),
    Run("eddce1265, compiled", "eddce1265", _SCRIPT + _COMPILE, (None, 47.65)),
    *(
        Run(
            f"9dec370ad, {what}",
            "9dec370ad",
            _PAIRS + option,
            (None, gib),
            settings="",
            world_size=gpus,
        )
        for what, option, gib, gpus in (
            ("8 GPUs", "", 82.4, 8),
            ("8 GPUs, compiled", _COMPILE, 77.0, 8),
            ("8 GPUs, float8", _FLOAT8, 76.8, 8),
            ("128 GPUs", "", 67.0, 128),
            ("128 GPUs, compiled", _COMPILE, 62.0, 128),
            ("128 GPUs, float8", _FLOAT8, 61.8, 128),
        )
    ),
    Run("e23bb707d, whole loss", "e23bb707d", _MODULE, (None, 49.58)),
    Run("e23bb707d, loss in chunks", "e23bb707d", _MODULE, (None, 42.26), edits=_CHUNKED),
    Run(
        "83c879f18, full checkpoints",
        "83c879f18",
        _LLAMA2 + "full",
        (None, 0.3264 * 95.0396),
        (None, 0.2392 * 95.0396),
        _NEWER_TORCH,
        "",
    ),
    Run(
        "83c879f18, checkpoints by operator",
        "83c879f18",
        _LLAMA2 + "selective --activation_checkpoint.selective_ac_option op",
        (None, 0.6251 * 95.0396),
        (None, 0.5213 * 95.0396),
        _NEWER_TORCH,
        "",
    ),
)


def make_data(folder: Path) -> None:
    """Makes up tokenizers of the right sizes, and texts."""
    import sentencepiece
    from datasets import Dataset

    words = [f"w{index}" for index in range(128_000)]
    texts = [" ".join(words[start : start + 500]) for start in range(0, 120_000, 500)] * 20
    lines = [bytes([value]) for value in range(256)] + [f" {word}".encode() for word in words]
    ranks = (base64.b64encode(line) + b" %d\n" % rank for rank, line in enumerate(lines[:128_000]))
    (folder / "llama3.model").write_bytes(b"".join(ranks))
    with (folder / "data.json").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words[:40_000]),
        model_prefix=str(folder / "llama2"),
        model_type="word",
        vocab_size=32_000,
        minloglevel=2,
    )
    Dataset.from_dict({"text": texts}).save_to_disk(str(folder / "minipile"))


def predict(run: Run, sources: Path) -> list[tuple[str, float, float]]:
    """Runs a launch under ``fxmem run``: names of figures, published ones, predicted ones."""
    root = str(Path(__file__).parents[1])
    with tempfile.TemporaryDirectory(prefix="torchtitan_") as temporary:
        data, copy = Path(temporary) / "data", Path(temporary) / "sources"
        data.mkdir()
        make_data(data)
        shutil.copytree(sources / run.commit, copy)
        for name, old, new in run.edits:
            text = (copy / name).read_text()
            assert old in text, f"{name} has no {old}"
            (copy / name).write_text(text.replace(old, new))
        texts = copy / "tests" / "assets" / "c4_test"
        texts.mkdir(parents=True, exist_ok=True)
        shutil.copy(data / "data.json", texts)
        options = ["--world-size", str(run.world_size), "--gpu", "h100-nvl", "--attention", "flash"]
        options += ["--steps", "2", "--json", "-o", str(data / "report.json")]
        command = shlex.split(run.command.format(data=data))
        output = subprocess.run(
            [sys.executable, "-m", "fxmem", "run", *options, *command],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": root, "PYTORCH_CUDA_ALLOC_CONF": run.settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        ).stdout
        if not (data / "report.json").exists():
            raise RuntimeError(f"{run.name}: {output[-2000:]}")
        steps = json.loads((data / "report.json").read_text())["script"]["steps"]
    printed = [float(found) for found in re.findall(r"memory: +([\d.]+)GiB", output)]
    for step, gib in zip(steps, printed, strict=False):  # the script's log is of the same figure
        assert abs(step["reserved_bytes"] / GIB - gib) < 0.0051, (run.name, step, gib)
    return [
        (what, published * GIB, steps[index][key])
        for what, published, key, index in run.list_published()
    ]
