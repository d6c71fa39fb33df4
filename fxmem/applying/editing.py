"""A file of Python code and the edits made to it, by position, so that all else stays as it was."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator

_RESERVED = frozenset(
    "context_fn debug determinism_check early_stop function preserve_rng_state"
    " use_reentrant".split()
)
"""What ``torch.utils.checkpoint.checkpoint`` takes for itself."""
_MODULE = "torch.utils.checkpoint"


class SourceFile:
    """A file of code that is edited.

    Args:
        path: Its name.
        text: Its text.

    Raises:
        SyntaxError: The text is no Python.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the user's escape sequences, for instance
            self.tree = ast.parse(text)
        self._lines = text.split("\n")
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line) + 1)
        self._edits: list[tuple[int, int, str]] = []
        self._checkpoint = ""

    def apply_edits(self) -> str:
        """The text with all edits.

        Raises:
            SyntaxError: The result is no Python.
        """
        text, end = "", 0
        for start, stop, new in sorted(set(self._edits)):
            text += self.text[end:start] + new
            end = stop
        text += self.text[end:]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, self.path, "exec", dont_inherit=True)
        return text

    def wrap_call(self, call: ast.Call) -> bool:
        """Has a call made by ``torch.utils.checkpoint``; False where its form is too unusual."""
        start, func_end = self._find(call.func)
        _, end = self._find(call)
        values: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        if any(keyword.arg is None or keyword.arg in _RESERVED for keyword in call.keywords):
            return False
        if not self._is_placed(call):
            return False
        if not values:
            if not re.fullmatch(r"\s*\(\s*\)", self.text[func_end:end]):
                return False
            edits = [(func_end, end, ", use_reentrant=False)")]
        else:
            spans = [self._find(value) for value in values]
            first, last = min(s for s, _ in spans), max(e for _, e in spans)
            if not re.fullmatch(r"\s*\(\s*", self.text[func_end:first]):
                return False
            if not re.fullmatch(r"\s*,?\s*\)", self.text[last:end]):
                return False
            edits = [(func_end, first, ", "), (last, last, ", use_reentrant=False")]
        self._edits += [(start, start, f"{self._import_checkpoint()}("), *edits]
        return True

    def rename_call(self, call: ast.Call, name: str) -> bool:
        """Has a call of an attribute, ``x.relu()``, call another, ``x.relu_()``; False likewise."""
        if not isinstance(call.func, ast.Attribute) or not self._is_placed(call):
            return False
        _, end = self._find(call.func)
        self._edits.append((end - len(call.func.attr), end, name))
        return True

    def add_argument(self, call: ast.Call, argument: str) -> bool:
        """Adds a keyword argument to a call; False where its form is too unusual."""
        values: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        if not values or any(keyword.arg is None for keyword in call.keywords):
            return False
        if not self._is_placed(call):
            return False
        last = max(self._find(value)[1] for value in values)
        if not re.fullmatch(r"\s*,?\s*\)", self.text[last : self._find(call)[1]]):
            return False
        self._edits.append((last, last, f", {argument}"))
        return True

    def add_statement(self, statement: ast.stmt, code: str) -> bool:
        """Adds a line after a statement; False where other code is on that line."""
        line = self._lines[statement.lineno - 1]
        indent = line[: len(line) - len(line.lstrip())]
        _, end = self._find(statement)
        rest = self.text[end : self._starts[statement.end_lineno or 0] - 1]
        begins = self._starts[statement.lineno - 1] + len(indent) == self._find(statement)[0]
        if not begins or not re.fullmatch(r"\s*(#.*)?", rest):
            return False
        place = end + len(rest.rstrip("\r"))
        newline = "\r\n" if rest.endswith("\r") else "\n"
        self._edits.append((place, place, f"{newline}{indent}{code}"))
        return True

    def _import_checkpoint(self) -> str:
        """The name of ``checkpoint`` in this file, imported if it is not yet."""
        if self._checkpoint:
            return self._checkpoint
        for statement in self.tree.body:
            if isinstance(statement, ast.ImportFrom) and statement.module == _MODULE:
                for alias in statement.names:
                    if alias.name == "checkpoint":
                        self._checkpoint = alias.asname or alias.name
                        return self._checkpoint
        taken = set(self._iterate_names())
        name = "checkpoint"
        while name in taken:
            name = f"torch_{name}"
        self._checkpoint = name
        code = f"from {_MODULE} import checkpoint"
        if name != "checkpoint":
            code += f" as {name}"
        self._add_import(code)
        return name

    def _add_import(self, code: str) -> None:
        top = list(self.tree.body)
        imports = [s for s in top if isinstance(s, ast.Import | ast.ImportFrom)]
        if imports and self.add_statement(imports[-1], code):
            return
        is_text = isinstance(top[0], ast.Expr) and isinstance(top[0].value, ast.Constant)
        start = self._starts[(top[1] if is_text and len(top) > 1 else top[0]).lineno - 1]
        self._edits.append((start, start, f"{code}\n\n"))

    def _iterate_names(self) -> Iterator[str]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name):
                yield node.id
            elif isinstance(node, ast.arg):
                yield node.arg
            elif isinstance(node, ast.alias):
                yield node.asname or node.name
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name

    def _is_placed(self, call: ast.Call) -> bool:
        """Whether a call is where Python says; within an f-string it was not before 3.12."""
        start, end = self._find(call)
        try:
            found = ast.parse(f"({self.text[start:end]})", mode="eval").body
        except SyntaxError:
            return False
        return ast.dump(found) == ast.dump(call)

    def _find(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        """Where a node begins and ends in the text."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (
            self._place(node.lineno, node.col_offset),
            self._place(node.end_lineno, node.end_col_offset),
        )

    def _place(self, line: int, column: int) -> int:
        # Python counts columns in bytes of UTF-8.
        head = self._lines[line - 1].encode("utf-8")[:column].decode("utf-8")
        return self._starts[line - 1] + len(head)
