"""Compiled training scripts of public records, against the memory that their logs have.

    python -m benchmarks.compiled_scripts --sources DIR [--only NAME ...] [-o PAGE]

``DIR`` holds checkouts of openai/parameter-golf and KellerJordan/modded-nanogpt, by those names.
Each record's script runs unchanged, as one of the log's ranks, under the release of torch that the
log names, or the next after its nightly build (environments.py). Data and tokenizer are stand-ins
of the same form; so is FlashAttention 3, by PyTorch's own attention.
"""

from __future__ import annotations

import argparse
import array
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tabulate import tabulate

from benchmarks.environments import ENVIRONMENTS, open_folder, prepare_environment
from benchmarks.stamp import put_page, write_time

_GOLF = "parameter-golf/records/track_10min_16mb"
_MODDED = "modded-nanogpt/records/track_1_short"
_MIB = 1 << 20
_TOKENIZER = """
class SentencePieceProcessor:
    def __init__(self, *_, **__): pass
    def vocab_size(self): return 1024
    def id_to_piece(self, token): return chr(97 + token % 26)
    def is_control(self, token): return False
    is_unknown = is_unused = is_byte = is_control
"""
_ATTENTION = """
from torch.nn.functional import scaled_dot_product_attention as attend
def flash_attn_func(q, k, v, causal=False):
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return attend(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)
"""


@dataclass(frozen=True)
class Record:
    """A record, with what its log says.

    Attributes:
        name: Of its folder.
        release: Of torch; where the log does not say, that of another log of its author, or of
            most of its time; of SlidingWindow_FP16Emb the one that fits.
        allocated_mib: The peak of rank 0.
        reserved_mib: The same of the reserved memory; None where the log does not say.
        settings: Of the script, as its README or the number of parameters in its log has them.
        script: In the folder; a log begins with the script.
        track: The folder of records.
        ranks: How many processes ran.
    """

    name: str
    release: str
    allocated_mib: int
    reserved_mib: int | None
    settings: Mapping[str, str] = field(default_factory=dict)
    script: str = "train_gpt.py"
    track: str = _GOLF
    ranks: int = 8


_LONG = {"TRAIN_BATCH_TOKENS": "786432", "TRAIN_SEQ_LEN": "2048", "MLP_MULT": "3"}
_AVERAGE = {"EMA_ENABLED": "1", "SWA_ENABLED": "0", "WARMUP_STEPS": "1"}
_QAT = {"MLP_MULT": "3", "QAT_ENABLED": "1", "QAT_INT6": "1"}
_ROPE = {"ROPE_DIMS": "16", "LN_SCALE": "1", "LATE_QAT": "1", "QAT_THRESHOLD": "0.1"}
_FA3 = {"NUM_LAYERS": "11", "BIGRAM_VOCAB_SIZE": "2048"}
RECORDS = (
    Record("2026-03-17_LoRA_TTT", "2.10", 10184, 10624, script="train_v0.txt"),
    Record("2026-03-17_LoRA_TTT", "2.7", 10334, 10348, script="train_v1.txt", ranks=2),
    Record("2026-03-17_NaiveBaseline", "2.10", 10184, 10200),
    Record("2026-03-18_FP16Embed_WD3600", "2.9", 10111, 10302, {"MLP_HIDDEN": "992"}),
    Record("2026-03-18_LongContextSeq2048", "2.8", 10247, 10488),
    Record("2026-03-18_LowerLR", "2.8", 10246, 10310),
    Record("2026-03-19_10L_MixedPrecision", "2.8", 11389, 11704, {"NUM_LAYERS": "10"}),
    Record("2026-03-19_MLP3x_QAT_Int6_SlidingWindow", "2.9", 11188, 11490, _QAT),
    Record("2026-03-19_MixedQuant_Int6Int8_SlidingWindow", "2.9", 11251, 11396),
    Record("2026-03-19_Seq2048_FP16Emb_TunedLR", "2.8", 12108, 12414, {"MLP_HIDDEN": "1344"}),
    Record("2026-03-19_SlidingWindowEval", "2.9", 10119, 10294, {"QAT": "0"}),
    Record("2026-03-19_SlidingWindow_FP16Emb_10L_MuonWD_OvertoneInit", "2.10", 11329, 11514),
    Record("2026-03-19_TrainingOptSeq4096", "2.8", 7748, 8070),
    Record("2026-03-19_WarmdownQuantization", "2.6", 16840, 17936, _LONG, script="train.log"),
    Record("2026-03-19_int6_STE QAT_ MLP_bigram _U_Net", "2.9", 11273, 11438, script="train.log"),
    Record("2026-03-19_smeargate_orthoinit_muonwd", "2.9", 11340, 11504, script="train_gpt_v5.py"),
    Record("2026-03-20_10L_Int5MLP_MuonWD04_SWA50", "2.10", 18871, 18976),
    Record(
        "2026-03-20_11L_EfficientPartialXSA_FA3_SWA120",
        *("2.9", 20300, 20412),
        {**_FA3, "XSA_LAST_N": "3"},
    ),
    Record(
        "2026-03-20_11L_XSA4_EMA_Int6_MLP3x_WD04_1.1271",
        *("2.9", 20600, 20658),
        {**_FA3, "XSA_LAST_N": "4", **_AVERAGE},
    ),
    Record(
        "2026-03-20_Int6_MLP3x_SmearGate_BigramHash_MuonWD_SWA",
        *("2.10", 16962, 17072),
    ),
    Record(
        "2026-03-21_11L_XSA4_EMA_PartialRoPE_LateQAT_1.1248",
        *("2.9", 20596, 20652),
        {**_FA3, "XSA_LAST_N": "4", **_AVERAGE, **_ROPE},
    ),
    Record("2024-12-10_MFUTweaks", "2.7", 34239, None, script="*.txt", track=_MODDED),
    Record("2024-12-17_SparsifyEmbeds", "2.7", 31361, 36734, script="*.txt", track=_MODDED),
    Record("2025-01-04_SoftCap", "2.7", 31563, None, script="*.txt", track=_MODDED),
)


def write_stand_ins(folder: Path) -> dict[str, str]:
    """Writes data and modules, and returns the variables that point there."""
    data = folder / "data" / "fineweb10B"
    data.mkdir(parents=True)
    (folder / "logs").mkdir()
    tokens = array.array("H", range(1024)) * 12_000
    header = array.array("i", [20240520, 1, len(tokens)] + [0] * 253)
    for name in ("fineweb_train_000001", "fineweb_val_000000"):
        (data / f"{name}.bin").write_bytes(header.tobytes() + tokens.tobytes())
    (folder / "sentencepiece.py").write_text(_TOKENIZER)
    (folder / "flash_attn_interface.py").write_text(_ATTENTION)
    for name in ("zstandard.py", "tokenizer.model"):  # which compresses what is trained
        (folder / name).touch()
    paths = f"{folder}{os.pathsep}{Path(__file__).parents[1]}"
    tokenizer = str(folder / "tokenizer.model")
    return {"DATA_PATH": str(data), "TOKENIZER_PATH": tokenizer, "PYTHONPATH": paths}


def find_script(record: Record, sources: Path, folder: Path) -> Path:
    """Finds the script of a record, or writes it as its log has it."""
    found = min((sources / record.track / record.name).glob(record.script))
    if found.suffix == ".py":
        return found
    script = folder / "train_gpt.py"
    script.write_text(found.read_text().partition("\n=====")[0])
    return script


def predict(record: Record, sources: Path, environments: Path) -> tuple[float, float]:
    """Predicts the peaks of allocated and reserved memory, in MiB."""
    environment = next(each for each in ENVIRONMENTS if each.release == record.release)
    python = prepare_environment(environment, environments)
    with tempfile.TemporaryDirectory() as folder:
        variables = os.environ | write_stand_ins(Path(folder)) | record.settings
        script = find_script(record, sources.resolve(), Path(folder))
        report = Path(folder) / "report.json"
        command = [str(python), "-m", "fxmem", "run", "--gpu", "h100", "--steps", "2"]
        options = ["--world-size", str(record.ranks), "-o", str(report)]
        run = subprocess.run(
            [*command, *options, script.name],
            cwd=script.parent,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        if not report.exists():
            raise RuntimeError(run.stderr.strip().splitlines()[-1])
        found = json.loads(report.read_text())
        if found["compile"] != "compiled":
            raise RuntimeError(f"{found['compile']}: {'; '.join(found['script']['notes'])}")
    return found["peak_bytes"] / _MIB, found["reserved_bytes"] / _MIB


def main() -> None:
    """Runs the records and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=Path, required=True, help="checkouts, by name")
    parser.add_argument("--only", nargs="*", default=[each.name for each in RECORDS])
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    rows = []
    with open_folder() as environments:
        for record in (each for each in RECORDS if each.name in options.only):
            row = [record.name, record.release, record.allocated_mib]
            try:
                found = predict(record, options.sources, environments)
            except RuntimeError as error:
                rows.append([*row, str(error)])
            else:
                differences = (f"{100 * (found[0] / record.allocated_mib - 1):+.1f}",)
                reserved = record.reserved_mib or "-", f"{found[1]:.0f}"
                rows.append([*row, f"{found[0]:.1f}", *differences, *reserved])
            print(*rows[-1], file=sys.stderr, flush=True)
    headers = ["record", "torch", "allocated, MiB", "predicted", "differs by %", "reserved, MiB"]
    only = "" if len(rows) == len(RECORDS) else f" --only {' '.join(options.only)}"
    command = f"python -m benchmarks.compiled_scripts --sources DIR{only}"
    page = f"""# Compiled training scripts

`{command}` at {write_time()}, each script
under the release of torch in the table, on the CPU.

The first twenty records by date of [parameter-golf](https://github.com/openai/parameter-golf)
(2026), and three of [modded-nanogpt](https://github.com/KellerJordan/modded-nanogpt) (2024 and
2025): GPTs of 9 to 12 layers that `torch.compile` compiles as a whole, trained by Muon on eight
H100s (LoRA_TTT under 2.7 on two); the latter with `flex_attention`, under nightly builds before
torch 2.7. The logs have the peaks of rank 0 after some thousand steps and evaluations; fxmem ran
two steps of the unchanged scripts, of which the two with moving averages (XSA4) warm up for one
step instead of twenty. LowerLR's script is NaiveBaseline's under another release, in which
`rms_norm` is not yet one operator.

Where a log does not name its release, it is that of another log of its author, or of its time;
but SlidingWindow_FP16Emb's is the one that fits: it would take 11,389.1 MiB under 2.8, 11,262.6
under 2.9.

Reserved memory differs between runs: four logs of one model under 2.10 (NaiveBaseline and
LoRA_TTT) have 10,200, 10,246, 10,572 and 10,624 MiB. The first run on a machine measures kernels,
with buffers that change what is reserved; fxmem predicts a later one, which does not
([why](../decisions/0031-benchmarks-of-kernels-are-not-counted.md)).

{tabulate(rows, [*headers, "predicted"], tablefmt="github", disable_numparse=True)}
"""
    put_page(page, options.output)


if __name__ == "__main__":
    main()
