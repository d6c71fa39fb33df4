"""The checks that ``[tool.fxmem]`` of a pyproject.toml lists."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fxmem.cli.output import parse_budget
from fxmem.cli.step import StepChoice, add_step_options, parse_step, write_options
from fxmem.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "pyproject.toml"
_EXAMPLE = "add [[tool.fxmem.checks]] with target, input and budget"


@dataclass(frozen=True, slots=True)
class Check:
    """A step that is to stay within a budget.

    Attributes:
        name: Its name, else its target.
        step: The step.
        budget_bytes: The most that its peak may be; None for any.
    """

    name: str
    step: StepChoice
    budget_bytes: int | None


def read_checks(folder: str) -> tuple[str, list[Check]]:
    """Reads the checks of the nearest pyproject.toml that has ``[tool.fxmem]``.

    Options of the table itself hold for every check that does not set them.

    Args:
        folder: Where to look first, before the folders above it.

    Returns:
        The folder of the file, and its checks.

    Raises:
        UsageError: There is no such file, or a mistake in it; names the key.
    """
    found = os.path.realpath(folder)
    while (table := _read_table(os.path.join(found, FILE))) is None:
        if found == os.path.dirname(found):
            raise UsageError(f"no {FILE} here or above has [tool.fxmem]", hint=_EXAMPLE)
        found = os.path.dirname(found)
    entries = table.pop("checks", None) if isinstance(table, dict) else None
    if (
        not entries
        or not isinstance(entries, list)
        or not all(isinstance(e, dict) for e in entries)
    ):
        raise UsageError(f"{FILE}: tool.fxmem.checks lists no checks", hint=_EXAMPLE)
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_step_options(parser)
    parser.add_argument("--budget", type=parse_budget)
    checks: list[Check] = []
    for number, entry in enumerate(entries, 1):
        place = f"{FILE}: tool.fxmem.checks[{number}]"
        try:
            checks.append(_read_check(parser, table, entry))
        except UsageError as error:
            raise UsageError(f"{place}.{error.cause}", hint=error.hint) from None
    return found, checks


def _read_table(path: str) -> Any:
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        try:
            return tomllib.load(file).get("tool", {}).get("fxmem")
        except ValueError as error:
            raise UsageError(f"{path} is not TOML: {error}") from None


def _read_check(
    parser: argparse.ArgumentParser, table: Mapping[str, Any], entry: Mapping[str, Any]
) -> Check:
    values = {key.replace("_", "-"): value for key, value in {**table, **entry}.items()}
    target = values.pop("target", None)
    if not isinstance(target, str):
        raise UsageError("target is missing", hint="write path/to/file.py:name")
    name = values.pop("name", target)
    options = {a.option_strings[-1][2:]: a for a in parser._actions if a.option_strings}
    arguments: dict[str, list[str]] = {}
    for key, value in values.items():
        if key not in options or key == "help":
            close = difflib.get_close_matches(key, options, n=1)
            hint = (
                f"did you mean {close[0]}?" if close else "an option of fxmem analyze, without --"
            )
            raise UsageError(f"{key} is not known", hint=hint)
        if isinstance(value, dict):  # input = { ids = "8x128:int64" }
            value = [f"{argument}={spec}" for argument, spec in value.items()]
        is_flag, is_list = options[key].nargs == 0, isinstance(value, list)
        if is_flag != isinstance(value, bool):
            kind = "true or false" if is_flag else "a text or a number"
            raise UsageError(f"{key} must be {kind}, got {value!r}")
        if is_list and not isinstance(options[key], argparse._AppendAction):
            raise UsageError(f"{key} takes one value, got {value!r}")
        arguments[key] = write_options({f"--{key}": value})
        try:
            parse_step(parser.parse_args([target, *arguments[key]]))
        except argparse.ArgumentError as error:
            raise UsageError(f"{key}: {error.message}") from None
        except UsageError as error:
            raise UsageError(f"{key}: {error.cause}", hint=error.hint) from None
    given = [text for texts in arguments.values() for text in texts]
    parsed = parser.parse_args([target, *given])
    return Check(str(name), parse_step(parsed), parsed.budget)
