"""Which containers a graph can build again so that nobody can tell them from the code's own."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

_BASES = (list, tuple, OrderedDict, dict)
_BUILDING = ("__new__", "__init__", "__setitem__")


def is_plain_container(value: Any) -> bool:
    """Tells whether the class of a list, tuple or dict makes the same of the same elements.

    >>> from collections import defaultdict
    >>> class Names(list): ...
    >>> is_plain_container(Names("ab")), is_plain_container(defaultdict(int))
    (True, False)
    """
    kinds = type(value).__mro__
    at = next(i for i, kind in enumerate(kinds) if kind in _BASES)
    if hasattr(value, "_fields"):  # a named tuple, whose base is the class that says so
        if kinds[0].__module__.startswith("torch."):  # as packed sequences, which check themselves
            return True
        at -= 1
    return not _has_state(value, kinds[:at]) and all(
        getattr(kinds[0], name, None) is getattr(kinds[at], name, None) for name in _BUILDING
    )


def _has_state(value: Any, kinds: tuple[type, ...]) -> bool:
    slots = any(vars(kind).get("__slots__") for kind in kinds)
    return slots or bool(getattr(value, "__dict__", None))


def is_plain_dataclass(value: Any) -> bool:
    """Tells whether a dataclass makes the same of its fields: its own code would run twice."""
    kind: Any = type(value)
    fields = dataclasses.fields(value)
    code = getattr(kind.__init__, "__code__", None)
    if code is None or code.co_filename != "<string>":  # the one that dataclasses write
        return False
    given = {field.name for field in fields if field.init}
    taken = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    if given != {*taken} or not all(hasattr(value, name) for name in given):
        return False
    if any(hasattr(value, field.name) for field in fields if not field.init):
        return False
    if not {*getattr(value, "__dict__", ())} <= given:
        return False
    return _holds_its_fields(value) if isinstance(value, dict) else _is_bare(kind)


def _is_bare(kind: type[Any]) -> bool:
    return not hasattr(kind, "__post_init__") and not issubclass(kind, (list, tuple))


def _holds_its_fields(value: dict[Any, Any]) -> bool:
    """Whether it is a dict of those of its fields that are set, as models of Hugging Face return.

    Its base, which is no dataclass, fills it; a ``__post_init__`` of the class's own does more.
    """
    owner = next((kind for kind in type(value).__mro__ if "__post_init__" in vars(kind)), None)
    if owner is None or not issubclass(owner, OrderedDict) or "__dataclass_fields__" in vars(owner):
        return False
    fields = dataclasses.fields(value)  # type: ignore[arg-type]
    found = {field.name: getattr(value, field.name) for field in fields}
    filled = [(name, element) for name, element in found.items() if element is not None]
    return len(filled) == len(value) and all(
        key == name and held is element
        for (key, held), (name, element) in zip(value.items(), filled, strict=True)
    )
