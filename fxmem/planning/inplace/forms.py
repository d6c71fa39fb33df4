"""Which operations have a form that runs in place, and how a plan writes it.

The one table of them: what is proposed, what is suggested for the user's code and what
:func:`fxmem.apply` puts into the graph all go by it.
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
"""What ``1 + x`` calls, where its name is not that of ``x + 1``."""

_FUNCTIONS = frozenset(
    "celu elu hardsigmoid hardswish hardtanh leaky_relu mish relu relu6 selu silu threshold".split()
)
"""Those of ``torch.nn.functional`` that take ``inplace=True``."""

_DROPOUTS = frozenset(
    "alpha_dropout dropout dropout1d dropout2d dropout3d feature_alpha_dropout".split()
)
"""Likewise; the mask is made first, then one product makes the result."""

_MODULES = {name.replace("_", ""): name for name in _FUNCTIONS | _DROPOUTS}
"""By the name of the module's class in small letters."""

_MODULE_METHODS = ("sigmoid", "tanh")
"""Modules without the flag, by the method that they call."""

COMMUTATIVE = ("add_", "mul_")
"""Calls that overwrite either of their two values: which of them, the change says."""

_COMMUTATIVE_OPERATORS = ("aten.add.Tensor", "aten.mul.Tensor")
_PRODUCT = "aten.mul.Tensor"

_COPIES = ("aten.clone.default", "aten._to_copy.default")
"""What ``reshape``, ``contiguous`` and ``to`` run where they cannot return their input."""

_EITHER_WAY = _DROPOUTS | frozenset("einsum tensordot sum_to_size checkpoint apply".split())
"""What returns its input, or a view of it, for some sizes or settings and not for others."""


class FormKind(Enum):
    """How an operation is made to run in place.

    Attributes:
        METHOD: By a method of the tensor, ``x.relu_()``.
        FUNCTION: By the flag of a function, ``F.relu(x, inplace=True)``.
        MODULE: By the flag of a module, ``nn.ReLU(inplace=True)``.
        MODULE_METHOD: A module, by a function of torch, ``torch.sigmoid_(x)``.
    """

    METHOD = "method"
    FUNCTION = "function"
    MODULE = "module"
    MODULE_METHOD = "module's method"


_WRITTEN = {
    FormKind.METHOD: ("", ""),
    FormKind.FUNCTION: ("F.", "(inplace=True)"),
    FormKind.MODULE: ("", "(inplace=True)"),
    FormKind.MODULE_METHOD: ("torch.", ""),
}
"""What stands before and after the name."""


@dataclass(frozen=True, slots=True)
class InplaceForm:
    """A call that runs in place.

    Attributes:
        kind: What it is a call of.
        name: Of the method with its underscore, of the function, or of the module's class.

    >>> str(InplaceForm(FormKind.FUNCTION, "relu"))
    'F.relu(inplace=True)'
    """

    kind: FormKind
    name: str

    def __str__(self) -> str:
        before, after = _WRITTEN[self.kind]
        return f"{before}{self.name}{after}"


def read_form(call: str) -> InplaceForm:
    """The form that :attr:`fxmem.planning.plan.InplaceChange.call` writes.

    >>> read_form("ReLU(inplace=True)").kind.name, read_form("add_").name
    ('MODULE', 'add_')
    """
    for kind in (FormKind.FUNCTION, FormKind.MODULE, FormKind.MODULE_METHOD):
        before, after = _WRITTEN[kind]
        if call.startswith(before) and call.endswith(after):
            return InplaceForm(kind, call.removeprefix(before).removesuffix(after))
    return InplaceForm(FormKind.METHOD, call)


def find_form(op: str, target: str, operator: str) -> InplaceForm | None:
    """What to call instead of a node; None where there is no such thing.

    Args:
        op: The node's, as in torch.fx.
        target: What it calls.
        operator: What makes its result, e.g. ``aten.relu.default``.

    >>> str(find_form("call_method", "radd", "aten.add.Tensor"))
    'add_'
    """
    is_module = op == "call_module"
    name = _MODULES.get(target.lower(), target.lower()) if is_module else target
    if not operator.startswith("aten."):
        return None
    if is_module:
        if name in _FUNCTIONS or (name in _DROPOUTS and operator == _PRODUCT):
            return InplaceForm(FormKind.MODULE, target)
        is_method = name in _MODULE_METHODS
        return InplaceForm(FormKind.MODULE_METHOD, f"{name}_") if is_method else None
    if name in _DROPOUTS and operator == _PRODUCT:
        return InplaceForm(FormKind.FUNCTION, name)
    name = _REFLECTED.get(name, name)
    base = _SYNONYMS.get(name, name)
    if base in _METHODS and operator.removeprefix("aten.").startswith(base):  # or clamp_min
        return InplaceForm(FormKind.METHOD, f"{name}_")
    return InplaceForm(FormKind.FUNCTION, name) if name in _FUNCTIONS else None


def is_commutative(operator: str) -> bool:
    """Tells whether the two values of an operator can change places.

    >>> is_commutative("aten.add.Tensor"), is_commutative("aten.sub.Tensor")
    (True, False)
    """
    return operator in _COMMUTATIVE_OPERATORS


def may_return_input(op: str, target: str) -> bool:
    """Whether a node returns its input, or a view of it, for some settings and not for others.

    Dropout does outside of training, and what a segment or an autograd function does is not known.
    What overwrites the one then changes the other as well.

    Args:
        op: The node's, as in torch.fx.
        target: What it calls.

    >>> may_return_input("call_module", "Dropout"), may_return_input("call_module", "Conv2d")
    (True, False)
    """
    if op != "call_module":
        return target in _EITHER_WAY or target[:1].isupper()  # the class of an autograd function
    return _MODULES.get(target.lower()) in _EITHER_WAY


def copies_where_it_must(target: str, operator: str) -> bool:
    """Tells whether an operator makes a result that other sizes or dtypes would not need.

    ``reshape``, ``contiguous`` and ``to`` return their input, or a view of it, where they can.

    Args:
        target: What its node calls.
        operator: What makes the node's result.

    >>> copies_where_it_must("reshape", "aten.clone.default")
    True
    >>> copies_where_it_must("clone", "aten.clone.default")
    False
    """
    return operator in _COPIES and target != "clone"
