"""In-place forms of operations, and the text that a plan writes for each.

The one table of them: plans, suggestions for the user's code and :func:`fxmem.apply` go by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

_METHODS = frozenset(
    """
    abs acos add addcdiv addcmul asin atan ceil clamp clamp_max clamp_min copysign cos cosh div
    erf erfc exp exp2 expm1 fix floor frac hypot lerp lgamma log log10 log1p log2 logit
    masked_fill mul nan_to_num neg pow reciprocal relu remainder round rsqrt sigmoid sign sin
    sinc sinh sqrt sub tan tanh tril triu trunc xlogy
    """.split()
)
"""Operators of ``torch.Tensor`` whose in-place variant has the same backward."""

_SYNONYMS = {
    "absolute": "abs",
    "clip": "clamp",
    "divide": "div",
    "multiply": "mul",
    "negative": "neg",
    "square": "pow",
    "subtract": "sub",
    "true_divide": "div",
}
"""Methods with an in-place variant of their own, and the operator they run."""

_REFLECTED = {"radd": "add", "rmul": "mul"}
"""Calls of ``1 + x``, where the name is not that of ``x + 1``."""

_FUNCTIONS = frozenset(
    "celu elu hardsigmoid hardswish hardtanh leaky_relu mish relu relu6 selu silu threshold".split()
)
"""Functions of ``torch.nn.functional`` that take ``inplace=True``."""

_DROPOUTS = frozenset(
    "alpha_dropout dropout dropout1d dropout2d dropout3d feature_alpha_dropout".split()
)
"""The same for dropout: the mask is made first, then one product makes the result."""

_MODULES = {name.replace("_", ""): name for name in _FUNCTIONS | _DROPOUTS}
"""By the name of the module's class in small letters."""

_MODULE_METHODS = ("sigmoid", "tanh")
"""Modules without the flag, by the method that they call."""

COMMUTATIVE = ("add_", "mul_")
"""Calls that overwrite either of their two values; the change names the value."""

COMMUTATIVE_OPERATORS = ("aten.add.Tensor", "aten.mul.Tensor")
_PRODUCT = "aten.mul.Tensor"

_COPIES = ("aten.clone.default", "aten._to_copy.default")
"""Operators of ``reshape``, ``contiguous`` and ``to`` that cannot return their input."""

_EITHER_WAY = _DROPOUTS | frozenset("einsum tensordot sum_to_size checkpoint apply".split())
"""Calls that return their input, or a view of the input, for some sizes or settings only."""


class FormKind(Enum):
    """A way to make an operation run in place."""

    METHOD = "method"  # x.relu_()
    FUNCTION = "function"  # F.relu(x, inplace=True)
    MODULE = "module"  # nn.ReLU(inplace=True)
    MODULE_METHOD = "module's method"  # torch.sigmoid_(x) for nn.Sigmoid


_WRITTEN = {
    FormKind.METHOD: ("", ""),
    FormKind.FUNCTION: ("F.", "(inplace=True)"),
    FormKind.MODULE: ("", "(inplace=True)"),
    FormKind.MODULE_METHOD: ("torch.", ""),
}
"""The text before and after the name."""


@dataclass(frozen=True, slots=True)
class InplaceForm:
    """A call that runs in place, by the name of the method, the function or the module's class.

    >>> str(InplaceForm(FormKind.FUNCTION, "relu"))
    'F.relu(inplace=True)'
    """

    kind: FormKind
    name: str

    def __str__(self) -> str:
        before, after = _WRITTEN[self.kind]
        return f"{before}{self.name}{after}"


def read_form(call: str) -> InplaceForm:
    """Reads the form that :attr:`fxmem.planning.plan.InplaceChange.call` writes.

    >>> read_form("ReLU(inplace=True)").kind.name, read_form("add_").name
    ('MODULE', 'add_')
    """
    for kind in (FormKind.FUNCTION, FormKind.MODULE, FormKind.MODULE_METHOD):
        before, after = _WRITTEN[kind]
        if call.startswith(before) and call.endswith(after):
            return InplaceForm(kind, call.removeprefix(before).removesuffix(after))
    return InplaceForm(FormKind.METHOD, call)


def find_form(op: str, target: str, operator: str) -> InplaceForm | None:
    """Finds the in-place form of a node of torch.fx, whose result an operator makes.

    >>> str(find_form("call_method", "radd", "aten.add.Tensor"))
    'add_'
    """
    if not operator.startswith("aten."):
        return None
    if op == "call_module":
        name = _MODULES.get(target.lower(), target.lower())
        if name in _FUNCTIONS or (name in _DROPOUTS and operator == _PRODUCT):
            return InplaceForm(FormKind.MODULE, target)
        is_method = name in _MODULE_METHODS
        return InplaceForm(FormKind.MODULE_METHOD, f"{name}_") if is_method else None
    if target in _DROPOUTS and operator == _PRODUCT:
        return InplaceForm(FormKind.FUNCTION, target)
    name = _REFLECTED.get(target, target)
    base = _SYNONYMS.get(name, name)
    if base in _METHODS and operator.removeprefix("aten.").startswith(base):  # or clamp_min
        return InplaceForm(FormKind.METHOD, f"{name}_")
    return InplaceForm(FormKind.FUNCTION, name) if name in _FUNCTIONS else None


def may_return_input(op: str, target: str, operator: str, *, is_result: bool) -> bool:
    """Returns whether other sizes or settings may make a node's result share its input's storage.

    Dropout returns its input outside of training, ``reshape``, ``contiguous`` and ``to`` where
    they can, and a segment or an autograd function may. Overwriting the one changes the other.
    ``is_result`` is whether the operator, one of the node's, makes the node's result.

    >>> may_return_input("call_module", "Dropout", "aten.mul.Tensor", is_result=True)
    True
    >>> may_return_input("call_method", "clone", "aten.clone.default", is_result=True)
    False
    """
    if is_result and operator in _COPIES and target != "clone":
        return True
    if op != "call_module":
        return target in _EITHER_WAY or target[:1].isupper()  # the class of an autograd function
    return _MODULES.get(target.lower()) in _EITHER_WAY
