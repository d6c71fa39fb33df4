"""Errors, exit codes and help of every command."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable

import pytest

from fxmem.cli import main
from fxmem.errors import FxmemError, TraceError

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
    """Makes fxmem.api.analyze raise."""

    def fail(error: BaseException) -> None:
        def analyze(*args: object, **kwargs: object) -> None:
            raise error

        module = types.ModuleType("fxmem.api")
        module.analyze = analyze
        monkeypatch.setitem(sys.modules, "fxmem.api", module)

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


def test_an_interrupt_is_quiet(
    fail_with: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(KeyboardInterrupt())
    assert main(COMMAND) == 130
    assert capsys.readouterr() == ("", "")


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


HELP = "try fxmem analyze --help"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "the following arguments are required: COMMAND (try fxmem --help)"),
        ([*COMMAND, "--top", "x"], f"argument --top: invalid int value: 'x' ({HELP})"),
        ([*COMMAND, "--xyz"], f"unrecognized arguments: --xyz ({HELP})"),
        (
            [*COMMAND, "--optimiser=adam"],
            "unrecognized arguments: --optimiser=adam (did you mean --optimizer?)",
        ),
        (
            [*COMMAND, "--batch-size", "8"],
            "unrecognized arguments: --batch-size 8 "
            "(the batch size is the first size of each --input)",
        ),
        (
            [*COMMAND, "8x3x224x224"],
            "unrecognized arguments: 8x3x224x224 (a shape is given as --input 8x3x224x224)",
        ),
        (
            ["nets/net.py:Net", "--input", "8x3"],
            "unknown command 'nets/net.py:Net' (write fxmem analyze nets/net.py:Net)",
        ),
        (["analyse", "x:y"], "unknown command 'analyse' (did you mean analyze?)"),
        (["show"], "unknown command 'show' (use analyze, plan, render, verify)"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    try:
        code = main(arguments)
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert capsys.readouterr() == ("", f"fxmem: error: {line}\n")


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
        ["render", "x:y", "-o", "/no/such/folder/file.svg"],
    ],
)
def test_help_and_usage_errors_do_not_wait_for_torch(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", LOADED_TORCH, *arguments], capture_output=True)
    assert done.returncode == 0
