"""Errors, exit codes and help of every command."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fxmem
from fxmem.cli import COMMANDS, main
from fxmem.errors import FxmemError, TraceError
from fxmem.planning.plan import Plan
from fxmem.report.formats import FORMATS, list_suffixes

COMMAND = ["analyze", "nets/net.py:Net"]
LOADED_TORCH = """
import sys
from fxmem.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
sys.exit("torch" in sys.modules or "tabulate" in sys.modules)
"""


@pytest.fixture
def fail_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Makes fxmem.analyze raise."""

    def fail(error: BaseException) -> None:
        def analyze(*args: object, **kwargs: object) -> None:
            raise error

        monkeypatch.setattr(fxmem, "analyze", analyze)

    return fail


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            TraceError("no size of nonzero(), net.py:12", hint="give --size-hint"),
            "fxmem: error: no size of nonzero(), net.py:12 (give --size-hint)",
        ),
        (FxmemError("no"), "fxmem: error: no"),
        (FxmemError("a\x1b[2J"), r"fxmem: error: a\x1b[2J"),
        (KeyError("x"), "fxmem: error: internal error: KeyError: 'x' (rerun with --debug)"),
        (
            RuntimeError("the cause\nframe #0: ..."),
            "fxmem: error: internal error: RuntimeError: the cause (rerun with --debug)",
        ),
    ],
)
def test_an_error_is_one_line_on_stderr_and_exit_2(
    fail_with: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    line: str,
) -> None:
    fail_with(error)
    assert main(COMMAND) == 2
    assert capsys.readouterr() == ("", f"{line}\n")


def test_debug_shows_what_an_error_was_raised_from(
    fail_with: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    error = TraceError("the step failed at net.py:3: KeyError: 'x'")
    error.__cause__ = KeyError("x")
    fail_with(error)
    assert main([*COMMAND, "--debug"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "KeyError: 'x'",
        "fxmem: error: the step failed at net.py:3: KeyError: 'x'",
    ]


ANALYZE, PLAN, RENDER, VERIFY = (
    f"{command} nets/net.py:Net --input 8x3" for command in ("analyze", "plan", "render", "verify")
)
NO_PLAN = "(fxmem plan -o writes one)"
NO_FOLDER = "no folder '/no/such/folder' (create it first)"


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("", "the following arguments are required: COMMAND (try fxmem --help)"),
        (
            "nets/net.py:Net",
            "unknown command 'nets/net.py:Net' (write fxmem analyze nets/net.py:Net)",
        ),
        ("analyse x:y", "unknown command 'analyse' (did you mean analyze?)"),
        ("show", f"unknown command 'show' (use {', '.join(COMMANDS)})"),
        (
            f"{ANALYZE} --top x",
            "argument --top: invalid int value: 'x' (try fxmem analyze --help)",
        ),
        (f"--debug {ANALYZE}", "unrecognized arguments: --debug (write fxmem analyze --debug)"),
        (f"{ANALYZE} --xyz", "unrecognized arguments: --xyz (try fxmem analyze --help)"),
        (
            f"{ANALYZE} --optimiser=adam",
            "unrecognized arguments: --optimiser=adam (did you mean --optimizer?)",
        ),
        (
            f"{ANALYZE} --batch-size 8",
            "unrecognized arguments: --batch-size 8 "
            "(the batch is the first size of each --input; fxmem max-batch finds the largest)",
        ),
        (
            f"{ANALYZE} --prompt 8",
            "--prompt is for --mode generate (inputs are --input 8x128)",
        ),
        (
            f"{ANALYZE} --mode generate --prompt 8",
            "--prompt and --input (the prompt is one of them)",
        ),
        ("analyze x:y --mode generate --batch 8", "--batch without --prompt (--prompt 2048)"),
        (
            f"{ANALYZE} 8x3x224x224",
            "unrecognized arguments: 8x3x224x224 (a shape is given as --input 8x3x224x224)",
        ),
        (f"{ANALYZE} --top -1", "--top must be 0 or more, got -1"),
        *(
            (
                f"{ANALYZE} --size-hint {size}",
                f"--size-hint must be 0 or more, or FILE:LINE=N, got {size}"
                " (--size-hint 16, or --size-hint expert.py:31=16)",
            )
            for size in ("-1", "expert.py:31")
        ),
        (f"{ANALYZE} --input a=1 --input a=2", "duplicate input 'a' (give each name once)"),
        (f"{ANALYZE} --dtype bf17", "unknown dtype 'bf17' (did you mean bf16?)"),
        (f"{ANALYZE} --budget 8", "a budget of 8 is 8 bytes (8GiB? 8B if bytes are meant)"),
        (
            f"{ANALYZE} --budget much",
            "'much' is not a size in bytes (write it as 8GiB, 512MiB or 80GB)",
        ),
        (f"{PLAN} --budget 8", "a budget of 8 is 8 bytes (8GiB? 8B if bytes are meant)"),
        (f"{PLAN} --fit", "--fit needs a GPU (name it: --gpu rtx4090)"),
        (
            "max-batch x:y --memory 8GiB --margin 2",
            "a budget of 2 is 2 bytes (2GiB? 2B if bytes are meant)",
        ),
        ("max-batch x:y", "no memory is given (--gpu rtx4090, or --memory 24GiB)"),
        (f"{PLAN} --max-overhead much", "--max-overhead: 'much' is not a share (0.1 or 10%)"),
        (f"{PLAN} --max-overhead -0.1", "--max-overhead must be 0 or more, got -0.1"),
        (
            f"{PLAN} --max-overhead-flops 10",
            "--max-overhead-flops of 10 is 1000 % (10% if percent is meant, else 1000%)",
        ),
        (f"{PLAN} --points 1", "--points must be 2 or more, got 1"),
        (f"{PLAN} --time-limit 0", "--time-limit must be more than 0 seconds, got 0"),
        (
            f"{PLAN} -o plan.json",
            "-o writes one plan, and none is chosen "
            "(give a limit, such as --budget 4GiB or --max-overhead 0.1)",
        ),
        (
            f"{PLAN} --budget 1GiB -o /no/such/folder/plan.json",
            f"cannot write '/no/such/folder/plan.json': {NO_FOLDER}",
        ),
        (
            f"{PLAN} --budget 1GiB --max-overhead 0.1",
            "argument --max-overhead: not allowed with argument --budget (try fxmem plan --help)",
        ),
        (
            f"{PLAN} --mode infer --max-overhead 0.1",
            "inference recomputes nothing (give --budget, or no limit)",
        ),
        (
            "render no.json -o peak.pdf",
            "cannot read the report 'no.json': No such file or directory"
            " (fxmem analyze --json -o writes one)",
        ),
        (f"{RENDER} -o peak.bmp", f"unknown output format '.bmp' (use {list_suffixes()})"),
        (f"{RENDER} -o .svg/peak", f"'peak' has no suffix (use {list_suffixes()})"),
        (
            f"{RENDER} --format bmp",
            f"unknown output format 'bmp' (use {', '.join(FORMATS)})",
        ),
        (f"{RENDER} --view sunset", "dot has no view 'sunset' (use graph)"),
        (f"{RENDER} --view timeline", "dot has no view 'timeline' (use svg, png, pdf)"),
        (
            f"{RENDER} --format pickle",
            "cannot write pickle to stdout (write to a file: -o peak.pickle)",
        ),
        (f"{RENDER} --depth 0", "--depth must be 1 or more, got 0"),
        *(
            (
                f"{command} --plan no.json",
                f"cannot read the plan 'no.json': No such file or directory {NO_PLAN}",
            )
            for command in (RENDER, VERIFY)
        ),
        (
            f"{VERIFY} --plan text.json",
            "this is not an fxmem plan (fxmem plan -o writes one)",
        ),
        (f"{VERIFY} --plan data.json", f"cannot read the plan 'data.json': not text {NO_PLAN}"),
        (f"{VERIFY} --plan plan.json --steps 0", "--steps must be 1 or more, got 0"),
        (f"{VERIFY} --plan plan.json --seed -1", "--seed must be 0 or more, got -1"),
        (
            f"{VERIFY} --plan plan.json --dtype f99",
            "unknown dtype 'f99' (float32, bf16, fp16, int64, bool, ...)",
        ),
        (
            f"{VERIFY} --plan plan.json --input 8y3",
            "bad shape '8y3' (write sizes joined by x, e.g. 8x3x224x224 or 1x128:int64)",
        ),
        (
            f"{PLAN} --budget 1GiB -o plan.svg",
            "this is not written as svg (use .html, .txt, .md, .csv, .json)",
        ),
        (
            f"{VERIFY} --plan plan.json -o /no/such/folder/a.txt",
            f"cannot write '/no/such/folder/a.txt': {NO_FOLDER}",
        ),
    ],
)
def test_bad_usage_is_told_in_one_line_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
    line: str,
) -> None:
    monkeypatch.chdir(tmp_path)  # where there is no nets/net.py
    Path("plan.json").write_text(Plan("0123", 200, 100).to_json())
    Path("text.json").write_text("no plan")
    Path("data.json").write_bytes(b"\xff\xfe\x00")
    try:
        code = main(shlex.split(command))
    except SystemExit as error:
        code = error.code
    assert (code, *capsys.readouterr()) == (2, "", f"fxmem: error: {line}\n")


def test_the_mode_that_is_called_infer(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*COMMAND, "--mode", "eval"])
    assert capsys.readouterr().err.endswith(" (did you mean infer?)\n")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == "fxmem 0.1.0\n"


@pytest.mark.parametrize("command", [[], ["analyze"]])
def test_help_has_examples_and_exit_codes(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "fxmem analyze resnet.py:ResNet18 --input 8x3x224x224 --optimizer adam" in text
    assert "exit codes:" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["analyze", "x:y", "--input", "3y"],
        ["plan", "x:y", "--fit"],
        ["max-batch", "x:y"],
        ["render", "x:y", "-o", "/no/such/folder/file.svg"],
    ],
)
def test_help_and_usage_errors_do_not_wait_for_torch(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", LOADED_TORCH, *arguments], capture_output=True)
    assert done.returncode == 0
