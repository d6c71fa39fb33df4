"""Compares compiled steps on the CPU with the same steps, compiled and run.

    python -m benchmarks.compiled [--only NAME ...] [--remeasure] [-o docs/results/compiled.md]
    python -m benchmarks.compiled --budgets [-o docs/results/compiled_budgets.md]

Each case is compiled by ``torch.compile`` with inductor's C++ backend and run for three steps in a
process of its own, without fxmem; what the third takes is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from tabulate import tabulate
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.measure import CACHE, STEP_MARK, THREADS, no_collector, read_events
from benchmarks.models import find
from benchmarks.stamp import put_page, write_stamp
from benchmarks.step import MODES, Mode, Step, tensors_of

NAMES = (
    *("hf_gpt2_labels", "hf_gpt2", "hf_gpt2_eager", "hf_bert_labels", "hf_bert"),
    *("hf_llama_labels", "hf_llama", "hf_t5_labels", "hf_vit_labels", "hf_whisper_labels"),
    *("lstm", "gru_bidirectional", "hand_rolled_rnn", "transformer_encoder"),
    *("transformer_pre_norm", "inplace", "tied_weights", "reused_module", "dict_output"),
    *("dataclass_output", "dataclass_loss", "checkpoint_non_reentrant", "custom_function"),
    *("views", "norms", "embedding_bag", "low_precision", "mixture_of_experts"),
    *("unet", "squeezenet", "resnet18"),
)
BUDGET_NAMES = ("hf_gpt2", "hf_llama_labels", "transformer_pre_norm")
BUDGETS = tuple(f"train, budget {tenths / 10:g}" for tenths in range(10))
"""Steps of training under an ``activation_memory_budget``."""


def split_step(step: str) -> tuple[Mode, float | None]:
    """Splits the name of a step into its mode and its activation memory budget."""
    mode, _, budget = step.partition(", budget ")
    return cast(Mode, mode), float(budget) if budget else None


def measure(name: str, step_name: str) -> dict[str, Any]:
    """Measures the third step of a compiled model: its peak, and what backward is handed."""
    mode, budget = split_step(step_name)
    if budget is not None:
        torch._functorch.config.activation_memory_budget = budget
    with no_collector(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step = Step(find(name), mode)
        step.model.compile()
        for _ in range(2):
            step.run()
            step.release()
        with record_function(STEP_MARK):
            step.run()
    found = read_events(prof)
    step.release()
    states = () if step.optimizer is None else step.optimizer.state.values()
    resident = [*(tensor for _, tensor in step.resident()), *tensors_of([*states])]
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in resident}
    kept_bytes = found["resident_bytes"] - sum(sizes.values())  # by the compiler
    saved = list_saved(step) if mode != "infer" else []
    return {
        "peak_bytes": found["peak_bytes"] - kept_bytes,
        "kept_bytes": kept_bytes,
        "saved": saved,
    }


def list_saved(step: Step) -> list[int]:
    """Lists the sizes of the storages that compiled functions keep for backward."""
    own = {tensor.untyped_storage()._cdata for _, tensor in step.resident()}
    step.run_forward()
    assert step.loss is not None
    saved: dict[int, int] = {}
    seen, waiting = set(), [step.loss.grad_fn]
    while waiting:
        function = waiting.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        waiting += [each for each, _ in function.next_functions]
        if function.name() == "CompiledFunctionBackward":
            for tensor in function.saved_tensors:
                storage = tensor.untyped_storage()
                if storage._cdata not in own and storage.nbytes():
                    saved[storage._cdata] = storage.nbytes()
    return sorted(saved.values())


def predict(name: str, step_name: str) -> dict[str, Any]:
    """Predicts the same."""
    import fxmem

    mode, budget = split_step(step_name)
    case = find(name)
    args, kwargs = case.inputs()
    options: dict[str, Any] = {
        "mode": "infer" if mode == "infer" else "train",
        "device": "cpu",
        "optimizer": "adam" if mode == "train+adam" else None,
    }
    compiled = {"compile": True, "activation_memory_budget": budget}
    analysis = fxmem.analyze(case.model(), args, kwargs, **compiled, **options)
    own = ("PARAMETER", "BUFFER", "INPUT")
    saved = {s.storage: s.nbytes for s in analysis.saved if s.category.value not in own}
    eager = fxmem.analyze(case.model(), args, kwargs, compile=False, **options)
    return {
        "peak_bytes": analysis.peak_bytes,
        "saved": sorted(saved.values()),
        "eager_bytes": eager.peak_bytes,
        "compile": analysis.setup.compile,
        "notes": [
            note
            for note in analysis.setup.notes
            if note.startswith("torch.compile") or "not counted" in note
        ],
    }


def run_apart(
    what: str, name: str, *, anew: bool, steps: Sequence[str] = MODES
) -> dict[str, dict[str, Any]]:
    """Measures or predicts steps in a process of their own; what was measured is kept."""
    path = CACHE / f"compiled-{name}{'' if steps is MODES else '-budgets'}.json"
    if what == "measure" and path.exists() and not anew:
        kept: dict[str, Any] = json.loads(path.read_text())
        return kept
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.compiled", f"--{what}", name]
    command += ["--steps", *steps]
    patient = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=patient)
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines:
        error = (run.stderr.strip().splitlines() or ["no output"])[-1]
        return {step: {"error": error} for step in steps}
    result: dict[str, Any] = json.loads(lines[-1])
    if what == "measure":
        CACHE.mkdir(parents=True, exist_ok=True)
        path.write_text(lines[-1])
    return result


def run_steps(
    run: Callable[[str, str], dict[str, Any]], name: str, steps: Sequence[str]
) -> dict[str, Any]:
    """Runs steps of a case; a failure is a result too."""
    results: dict[str, Any] = {}
    for step in steps:
        torch._dynamo.reset()
        try:
            results[step] = run(name, step)
        except Exception as error:
            results[step] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    return results


def compare(name: str, step: str, real: dict[str, Any], ours: dict[str, Any]) -> list[Any]:
    """Compares a step of one case: a row of the table."""
    errors = [each["error"] for each in (real, ours) if "error" in each]
    if errors:
        return [name, step, None, None, None, None, None, None, errors[0][:100]]
    difference = 100 * (ours["peak_bytes"] / real["peak_bytes"] - 1)
    counts = Counter(ours["saved"]), Counter(real["saved"])
    is_whole = ours["compile"] == "compiled" and "broken off" not in " ".join(ours["notes"])
    saved = "" if step == "infer" or not is_whole else "yes" if counts[0] == counts[1] else "no"
    shown = "0" if ours["peak_bytes"] == real["peak_bytes"] else f"{difference:+.3f}"
    peaks = (ours["eager_bytes"], real["peak_bytes"], ours["peak_bytes"])
    kept, notes = f"{real['kept_bytes']:,}", " ".join(ours["notes"])
    return [name, step, *(f"{nbytes:,}" for nbytes in peaks), shown, kept, saved, notes]


def compare_cases(names: Sequence[str], steps: Sequence[str], *, anew: bool) -> list[list[Any]]:
    """Compares steps of several cases, a row each."""
    rows = []
    for name in names:
        real, ours = (run_apart(w, name, anew=anew, steps=steps) for w in ("measure", "predict"))
        for step in steps:
            rows.append(compare(name, step, real[step], ours[step]))
            print(*rows[-1], flush=True)
    return rows


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="cases; default all")
    parser.add_argument("--budgets", action="store_true", help="of steps under memory budgets")
    parser.add_argument("--remeasure", action="store_true", help="ignore what is kept")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--steps", nargs="*", default=MODES, help=argparse.SUPPRESS)
    for what in ("measure", "predict"):
        parser.add_argument(f"--{what}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    for what, run in (("measure", measure), ("predict", predict)):
        if chosen := getattr(options, what):
            print(json.dumps(run_steps(run, chosen, options.steps)))
            return
    steps = BUDGETS if options.budgets else MODES
    names = options.only or (BUDGET_NAMES if options.budgets else NAMES)
    rows = compare_cases(names, steps, anew=options.remeasure)
    equal = sum(row[5] == "0" for row in rows)
    compared = [row[7] for row in rows if row[7]]
    headers = ["model", "step", "eager, predicted", "compiled, measured", "compiled, predicted"]
    headers += ["differs by %", "kept", "saved equal", "notes"]
    table = tabulate(rows, headers, tablefmt="github")
    command = "python -m benchmarks.compiled -o docs/results/compiled.md"
    title, what = "Compiled steps on the CPU", ""
    if options.budgets:
        command = "python -m benchmarks.compiled --budgets -o docs/results/compiled_budgets.md"
        title = "Activation memory budgets on the CPU"
        what = """
Ten values of `torch._functorch.config.activation_memory_budget`: the less backward may be handed,
the more PyTorch's partitioner recomputes.
"""
    page = f"""# {title}

{write_stamp(command)}
{what}
The third step of models that `torch.compile` compiles with inductor's C++ backend, against the
profiler's events of the same step, in bytes: {equal} of {len(rows)} peaks are equal to the byte.
What a model of one graph saves for backward is equal in sizes in {compared.count("yes")} of
{len(compared)}. Dynamo leaves recurrent networks as they are. The few bytes that the compiler
itself keeps (*kept*) are no part of the peaks.

{table}
"""
    put_page(page, options.output)


if __name__ == "__main__":
    main()
