"""In-place forms of operations, the text that a plan writes for each, and their nodes in FX graphs.

The one table of them: plans, suggestions for the user's code and :func:`fxmem.apply` go by it. Only
attributes of nodes are read: torch is not needed for that.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fxmem.planning.plan import InplaceChange

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


NODE = "fxmem_node"
"""Key of an FX node's ``meta``: :data:`fxmem.tracing.fxgraph.NODE`, for those without torch."""

WATCHED = "fxmem_watched"
"""The same of :data:`fxmem.tracing.fxgraph.WATCHED`."""

_PARTS = (operator.getitem, getattr, "size")
"""Targets that take a result apart."""


class FormKind(Enum):
    """A way to make an operation run in place; the text before and after its name in a plan."""

    METHOD = "", ""  # x.relu_()
    FUNCTION = "F.", "(inplace=True)"  # F.relu(x, inplace=True)
    MODULE = "", "(inplace=True)"  # nn.ReLU(inplace=True)
    MODULE_METHOD = "torch.", ""  # torch.sigmoid_(x) for nn.Sigmoid


@dataclass(frozen=True, slots=True)
class InplaceForm:
    """A call that runs in place, by the name of the method, the function or the module's class.

    >>> str(InplaceForm(FormKind.FUNCTION, "relu"))
    'F.relu(inplace=True)'
    """

    kind: FormKind
    name: str

    def __str__(self) -> str:
        before, after = self.kind.value
        return f"{before}{self.name}{after}"


def read_form(call: str) -> InplaceForm:
    """Reads the form that :attr:`fxmem.planning.plan.InplaceChange.call` writes.

    >>> read_form("ReLU(inplace=True)").kind.name, read_form("add_").name
    ('MODULE', 'add_')
    """
    for kind in (FormKind.FUNCTION, FormKind.MODULE, FormKind.MODULE_METHOD):
        before, after = kind.value
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


@dataclass(frozen=True, slots=True)
class OverwritingNode:
    """A node of an FX graph that overwrites the result of another, by a call of some form."""

    node: Any
    form: InplaceForm
    is_second: bool  # whether the second of its two values is overwritten
    maker: Any  # the call of a module that made the value; None where no module did
    consumers: tuple[Any, ...]  # the calls of other modules that take the value

    @property
    def is_watched(self) -> bool:
        """Returns whether hooks of these modules, as traced, may keep the overwritten value."""
        given = (*self.consumers, *((self.node,) if self.node.op == "call_module" else ()))
        made = () if self.maker is None else (self.maker,)
        return any(n.meta[WATCHED][0] for n in given) or any(n.meta[WATCHED][1] for n in made)


def find_overwriting(graph: Any, changes: Iterable[InplaceChange]) -> Iterator[OverwritingNode]:
    """Finds the nodes of a traced FX graph that changes are of; some have no place in it."""
    owners = find_owners(graph)
    by_name = {node.meta[NODE]: node for node in graph.nodes if NODE in node.meta}
    for change in changes:
        node = by_name[change.node]
        form = read_form(change.call)
        taken = [n for n in node.all_input_nodes if owners.get(n) == change.overwrites]
        if len(taken) != 1:
            continue
        places = [*node.args, *node.kwargs.values()]
        is_second = places[0] is not taken[0] and len(places) > 1 and places[1] is taken[0]
        if is_second and form.name not in COMMUTATIVE:
            continue
        (value,) = taken
        users = dict.fromkeys(value.users)
        while value.op not in ("call_module", "placeholder", "get_attr") and value.all_input_nodes:
            value = value.all_input_nodes[0]  # of which it may be a view
            users |= dict.fromkeys(value.users)
        consumers = tuple(n for n in users if n.op == "call_module" and n is not node)
        maker = value if value.op == "call_module" else None
        yield OverwritingNode(node, form, is_second, maker, consumers)


def find_owners(graph: Any) -> dict[Any, str]:
    """Finds, by node of a traced FX graph, the traced node that it is part of.

    Nodes that take a result apart belong to its maker, nodes that compute sizes to their user.
    """
    owners: dict[Any, str] = {}
    waiting: list[Any] = []
    for node in graph.nodes:
        if NODE in node.meta:
            owners[node] = node.meta[NODE]
            owners.update(dict.fromkeys(waiting, owners[node]))
            waiting.clear()
        elif node.target in _PARTS and node.all_input_nodes:
            source = node.all_input_nodes[0]
            if source in owners:
                owners[node] = owners[source]
        elif node.op not in ("placeholder", "output", "get_attr"):
            waiting.append(node)
    return owners
