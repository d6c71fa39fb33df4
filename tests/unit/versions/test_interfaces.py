"""The private names of torch in the code of fxmem are listed, and all there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fxmem
from fxmem.patching import find_path
from fxmem.versions import interfaces
from fxmem.versions.interfaces import INTERFACES, Interface, find_missing, find_owner

SOURCES = sorted(Path(fxmem.__file__).parent.rglob("*.py"))
LISTED = {f"{each.owner}.{name}" for each in INTERFACES for name in each.names}


def test_the_installed_release_has_them_all() -> None:
    assert find_missing() == []


def test_the_first_that_breaks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Interface("torch._C", ("DispatchKey", "_gone"), "test", "none")
    later = Interface("torch.of_tomorrow", ("name",), "test", "none", since=(99, 0))
    moved = Interface("torch.fx.moved", ("name",), "test", "none")
    monkeypatch.setattr(interfaces, "INTERFACES", (gone, later, moved))
    assert find_missing() == ["torch._C._gone", "torch.fx.moved.name"]


def test_all_that_the_code_uses_are_listed() -> None:
    used = {name for path in SOURCES for name in _iterate_private(ast.parse(path.read_text()))}
    unlisted = {name for name in used if not (_is_listed(name) or _is_listed(_find_home(name)))}
    assert unlisted == set()


def _find_home(name: str) -> str:
    """Returns a name of a class as the module that defines the class would have it."""
    owner, _, attribute = name.rpartition(".")
    kind = find_owner(owner)
    return f"{find_path(kind)}.{attribute}" if isinstance(kind, type) else name


def _is_listed(name: str) -> bool:
    """Returns whether a name, what it is an attribute of, or an attribute of its is listed."""
    return any(
        name == listed or name.startswith(f"{listed}.") or listed.startswith(f"{name}.")
        for listed in LISTED
    )


def _iterate_private(tree: ast.Module) -> Iterator[str]:
    """Yields the dotted names of torch with a private part that a module imports or spells."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            aliases |= {a.asname or "torch": a.name for a in node.names if a.name == "torch"}
    spelled = {_spell(node, aliases) for node in ast.walk(tree) if isinstance(node, ast.expr)}
    for name in {*aliases.values(), *spelled}:
        parts = name.split(".")
        if any(part.startswith("_") and not part.startswith("__") for part in parts):
            yield name


def _spell(node: ast.expr, aliases: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute) and (owner := _spell(node.value, aliases)):
        return f"{owner}.{node.attr}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
        owner, name = _spell(node.args[0], aliases), node.args[1]
        return f"{owner}.{name.value}" if owner and isinstance(name, ast.Constant) else ""
    return aliases.get(node.id, "") if isinstance(node, ast.Name) else ""
