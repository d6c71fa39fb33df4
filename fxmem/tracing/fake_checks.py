"""Code that asks whether it is given fake tensors, and then takes another way than in a run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from torch._subclasses.fake_tensor import FakeTensor

from fxmem.tracing.known_values import find_known

_ASKING = (("transformers.utils.import_utils", "is_fake_tensor"),)
"""Functions of libraries that are loaded, by module and name.

Transformers looks whether a mask masks anything (``masking_utils._ignore_causal_mask_sdpa``), but
not into fake tensors, for which it makes masks that no run has.
"""


@contextlib.contextmanager
def answer_fake_checks() -> Iterator[None]:
    """Has tensors whose value is known count as real ones."""
    replaced = [
        (vars(sys.modules[module]), name, vars(sys.modules[module])[name])
        for module, name in _ASKING
        if name in vars(sys.modules.get(module, object))
    ]
    for names, name, _ in replaced:
        names[name] = _is_unknown
    try:
        yield
    finally:
        for names, name, function in replaced:
            names[name] = function


def _is_unknown(value: object) -> bool:
    return isinstance(value, FakeTensor) and find_known(value) is None
