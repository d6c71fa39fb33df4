"""The text of a TARGET, taken apart; no user code runs here."""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from fxmem.errors import LoadError

_TARGET = re.compile(
    r"(?P<where>.+?):(?P<name>[^\W\d]\w*(?:\.[^\W\d]\w*)*)\s*(?P<call>\(.*\))?", re.DOTALL
)
_MODULE = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_LONGEST_SIGNATURE = 160
_MOST_NAMES = 8
_WEIGHTS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".onnx")


@dataclass(frozen=True)
class Target:
    """A TARGET."""

    text: str  # as the user wrote it
    where: str  # the dotted module, or the path of a file
    is_file: bool  # which of the two
    name: str  # of the object in it, with dots
    has_call: bool = False  # arguments are given
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def without_call(self) -> str:
        """The target without its arguments."""
        return f"{self.where}:{self.name}"


def is_target(value: object) -> TypeGuard[str]:
    """Returns whether a loss or an optimizer is named by a TARGET, not by a name of fxmem's own.

    >>> is_target("nets.py:make_loss"), is_target("adam(betas={0: 1})"), is_target(None)
    (True, False, False)
    """
    return isinstance(value, str) and ":" in value.partition("(")[0]


def parse_target(text: str) -> Target:
    """Takes a TARGET apart.

    Raises:
        LoadError: It is none; says what is missing.

    >>> target = parse_target("nets/resnet.py:build(50, norm='bn')")
    >>> target.where, target.is_file, target.name, target.args, target.kwargs
    ('nets/resnet.py', True, 'build', (50,), {'norm': 'bn'})
    """
    text = text.strip()
    match = _TARGET.fullmatch(text)
    if match is None:
        raise _explain_bad_target(text)
    where = match["where"].strip()
    is_file = where.endswith(".py") or "/" in where or "\\" in where
    if not (is_file or _MODULE.fullmatch(where)) or where.endswith(_WEIGHTS):
        raise _explain_bad_target(where if where.endswith(_WEIGHTS) else text)
    args, kwargs = _parse_call(match["call"], text) if match["call"] else ((), {})
    return Target(text, where, is_file, match["name"], bool(match["call"]), args, kwargs)


def _explain_bad_target(text: str) -> LoadError:
    if text.endswith(_WEIGHTS):
        return LoadError(
            f"{text!r} contains weights, not code",
            hint="name the code of the model: path/to/file.py:Model",
        )
    if os.path.isdir(text):
        return LoadError(f"{text!r} is a folder", hint="name a .py file in it, and what is in it")
    if ":" not in text:
        example = text if re.fullmatch(r"[\w./\\-]+", text) else "package.module"
        names = _list_classes(text) or ["Model"]
        more = ", ..." if len(names) > _MOST_NAMES else ""
        others = f", or {', '.join(names[1:_MOST_NAMES])}{more}" if len(names) > 1 else ""
        return LoadError(
            f"target {text!r} does not say which model", hint=f"write {example}:{names[0]}{others}"
        )
    return LoadError(
        f"target {text!r} cannot be understood",
        hint="write package.module:Model, path/to/file.py:Model or module:factory(depth=50)",
    )


def _list_classes(path: str) -> list[str]:
    """Lists the classes of a file that may be models, without running it."""
    try:
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return []
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = map(ast.unparse, node.bases)
            if any(base.endswith("Module") or base in names for base in bases):
                names.append(node.name)
    return names


def _parse_call(call: str, text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    try:
        node = ast.parse(f"f{call}", mode="eval").body
        if isinstance(node, ast.Call) and all(keyword.arg for keyword in node.keywords):
            args = tuple(ast.literal_eval(value) for value in node.args)
            return args, {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        pass
    raise LoadError(
        f"bad arguments {call!r} in target {text!r}",
        hint="pass numbers, strings, True, None, lists, tuples or dicts, e.g. factory(depth=50)",
    )


def check_call(factory: Callable[..., Any], target: Target) -> None:
    """Checks that the target's arguments fit the callable, before it runs.

    Raises:
        LoadError: They do not; shows the signature and how to pass them.
    """
    try:
        signature = inspect.signature(factory)
    except (ValueError, TypeError):  # built in, and does not say
        return
    try:
        signature.bind(*target.args, **target.kwargs)
    except TypeError as error:
        missing = [
            name
            for name, parameter in signature.parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        example = ", ".join(f"{name}=..." for name in missing)
        raise LoadError(
            f"{target.text!r}: {error}; it is {target.name}{shorten_signature(signature)}",
            hint=f"pass literals: '{target.without_call}({example})'; or name a function that "
            "returns it"
            if missing
            else "",
        ) from None


def shorten_signature(signature: inspect.Signature) -> str:
    """Writes a signature without annotations, which are longer than all else."""
    plain = signature.replace(
        parameters=[
            parameter.replace(annotation=parameter.empty)
            for parameter in signature.parameters.values()
        ],
        return_annotation=signature.empty,
    )
    text = str(plain)
    return text if len(text) <= _LONGEST_SIGNATURE else text[:_LONGEST_SIGNATURE] + "...)"
