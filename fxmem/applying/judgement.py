"""Whether a plan's graph is what a model's code does in a call.

Written in words that compilers follow: they look into each call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from fxmem.applying.arguments import (
    find_mismatch,
    list_expected,
    list_parameters,
    name_arguments,
    write_difference,
)
from fxmem.applying.retracing import is_graph_of
from fxmem.applying.settings import Place, Read, Settings, watch_reads
from fxmem.applying.surroundings import TRANSFORMED, is_transforming, write_surroundings
from fxmem.applying.walk import Walk
from fxmem.applying.warning import warn_caller
from fxmem.tracing.contexts import read_autocast
from fxmem.tracing.fxgraph import ENTERED, READS, SURROUNDINGS
from fxmem.tracing.leaves import find_class, is_leaf
from fxmem.tracing.signatures import (
    Surroundings,
    Tie,
    describe_value,
    list_tensors,
    list_ties,
)

_REPLACED = (
    "modules of the model were replaced since the plan was applied: this step runs without it"
)

_MOST_TRACES = 4
"""Of the model, for one attribute that the code reads: a step counter is not traced for in each."""
_MOST_CASES = 10_000
"""Sizes and the like that are remembered."""

State = tuple[bool, tuple[Any, ...]]
"""What a copy has to know: whether it may be another model than the plan's, and its modules."""


class Judgement:
    """What a graph was traced with, to be held against what each call comes with.

    Args:
        planned: The module that runs the graph, and that has the model's modules.
        model: The model that the graph was traced from.
        graph: The graph.
        mode: ``"train"`` or ``"infer"``: the calls that the plan is for.
        size_hint: What was assumed of sizes that depend on data.

    Attributes:
        walk: The modules.
    """

    walk: Walk

    def __init__(
        self,
        planned: nn.Module,
        model: nn.Module,
        graph: fx.Graph,
        mode: str,
        size_hint: int | None,
    ) -> None:
        nodes = [*graph.nodes]
        entered = frozenset(name for node in nodes for name in node.meta.get(ENTERED, ()))
        read = frozenset(str(node.target) for node in nodes if node.op == "get_attr")
        self.walk = Walk(planned, entered, read)
        self._model, self._graph, self._mode, self._size_hint = model, graph, mode, size_hint
        self._expected = list_expected(nodes)
        self._taken = list_parameters(model)
        self._reads: frozenset[Place] = frozenset(
            place for node in nodes for place in node.meta.get(READS, ())
        )
        self._forget()
        self._is_unsure = self._is_replaced = False
        self._described = self._describe_modules()
        traced = [node.meta[SURROUNDINGS] for node in nodes if SURROUNDINGS in node.meta]
        self._ties: tuple[Tie, ...] = traced[0].ties if traced else ()
        self._surroundings = traced[0]._replace(ties=()) if traced else self._read_surroundings([])

    def choose_values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """What the graph takes of a call's arguments; None, with a warning, where it is not run.

        Args:
            args: Of a call in the mode of the plan.
            kwargs: Likewise.
        """
        if not torch.compiler.is_compiling() and is_transforming():
            warn_caller(TRANSFORMED)
            return None
        if self.walk.update():
            self._meet_modules()
        hooked = self.walk.find_hooked()
        if hooked:
            warn_caller(
                f"the plan's graph does not call {hooked}, which has hooks: this step runs without"
                " it (a plan of style 'modules' calls it)"
            )
            return None
        unseen = self.walk.find_unseen()
        if unseen:
            warn_caller(
                f"the plan's graph does not call {unseen}, and there are hooks on all modules: this"
                " step runs without it (a plan of style 'modules' calls it)"
            )
            return None
        is_train = self._mode == "train"
        switched = [name for name, module in self._owned if module.training is not is_train]
        if switched:
            warn_caller(
                f"the plan's graph has {switched[0]} in the mode of the model, and its code may ask"
                " for it: this step runs without the plan (one of style 'modules' runs that code)"
            )
            return None
        if self._describe_modules() != self._described:
            warn_caller(_REPLACED)
            return None
        given = name_arguments(self._model, self._taken, args, kwargs)
        mismatch = find_mismatch(self._expected, self._taken, given)
        if mismatch:
            warn_caller(
                f"the plan was made for other arguments ({mismatch}): this step runs without it"
            )
            return None
        case = self._find_case(given)
        changed = self._find_changed(case)
        if not self._fits_call(case, changed, args, kwargs):
            if not torch.compiler.is_compiling():
                warn_caller(self._explain(given, case, changed))
            return None
        return [given.get(argument.name, argument.constant) for argument in self._expected]

    def read_state(self) -> State:
        """What a copy has to know, as it does not see what was traced."""
        if self.walk.update():
            self._meet_modules()
        return self._is_unsure or bool(self._settings.find_changed()), self._described

    def set_state(self, state: State) -> None:
        """Takes over what was known of a model that this one is a copy of.

        Args:
            state: From :meth:`read_state`. Where attributes differed, the first call traces the
                model.
        """
        self._is_unsure, self._described = state

    def _meet_modules(self) -> None:
        """Takes what others put in the place of modules whose code was traced for unknown."""
        if [*_list_coded(self._model)] != self._coded or self._list_parts() != self._parts:
            self._forget()
            self._is_unsure = self._is_replaced = True

    def _describe_modules(self) -> tuple[Any, ...]:
        """Their classes, and how many buffers they have, which hooks on weights add to."""
        return tuple(map(type, self.walk.modules[1:])), self.walk.count_buffers()

    def _forget(self) -> None:
        """Takes modules and attributes for what they are now."""
        self._coded = [*_list_coded(self._model)]
        self._parts = self._list_parts()
        self._owned = [(name, part) for name, part in self._coded if name and _has_own_code(part)]
        self._owned += [(name, part) for name, part, read in self._parts if read == "training"]
        parts = [part for part in self._parts if part[2] != "training"]
        self._settings = Settings(self._coded, parts)
        self._planned = _Case(is_met=True)
        self._others: dict[tuple[Any, ...], _Case] = {}
        self._traces: Counter[Place] = Counter()

    def _list_parts(self) -> list[tuple[str, nn.Module, str]]:
        """By name, what the code reads of modules of PyTorch that the graph calls."""
        if not self._reads:
            return []
        named = dict(self._model.named_modules())
        return [(name, named[name], read) for name, read in sorted(self._reads) if name in named]

    def _fits_call(
        self, case: _Case, changed: Sequence[Place], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        """Whether the graph is what the model's code does for these sizes and attributes."""
        if case is self._planned and not changed and not self._is_unsure:
            return True
        if torch.compiler.is_compiling():  # nothing can be traced while something is
            return False
        if not self._planned.decisive.union(case.decisive).isdisjoint(changed):
            return False
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            return not changed  # an analysis, whose sizes have to be those of the plan
        fits = case.fits.get(self._settings.freeze_values(changed))
        if fits is None:
            if self._find_restless(changed):
                return False
            fits, changed = self._trace_again(case, changed, args, kwargs)
            case.fits[self._settings.freeze_values(changed)] = fits
        if fits and not changed and case is self._planned:
            self._is_unsure = self._is_replaced = False
        return fits

    def _find_changed(self, case: _Case) -> list[Place]:
        """Attributes that are not what they were, and that the code may read in such a call."""
        changed = self._settings.find_changed()
        if not changed or case.reads is None:
            return changed
        return [place for place in changed if self._settings.is_read(place, case.reads)]

    def _trace_again(
        self, case: _Case, changed: Sequence[Place], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[bool, Sequence[Place]]:
        """Whether the graph is that of a call, and what of what changed that depends on."""
        with watch_reads() as reads:
            fits = is_graph_of(self._graph, self._model, args, kwargs, self._mode, self._size_hint)
        if fits:  # what the code does not read may change with every step
            reads |= case.reads or set()
            known = (self._planned.reads, *(other.reads for other in self._others.values()))
            case.reads = next((other for other in known if other == reads), reads)  # held once
            changed = self._find_changed(case)
        else:
            case.decisive.update(p for p in changed if self._settings.is_read(p, reads))
        if case.is_met:
            self._traces.update(changed)
        case.is_met = True
        return fits, changed

    def _find_restless(self, changed: Iterable[Place]) -> Place | None:
        """An attribute that goes on changing, and for which the model is not traced any more."""
        return next((place for place in changed if self._traces[place] >= _MOST_TRACES), None)

    def _find_case(self, given: Mapping[str, Any]) -> _Case:
        """What is known of calls with such arguments, under this autocast."""
        taken = [argument for argument in self._expected if not argument.is_constant]
        described = tuple(describe_value(given[argument.name]) for argument in taken)
        surroundings = self._read_surroundings([given[argument.name] for argument in taken])
        is_known = described == tuple(argument.signature for argument in taken)
        if is_known and surroundings == self._surroundings:
            return self._planned
        if torch.compiler.is_compiling():
            return _Case()
        key = described, surroundings
        if key not in self._others:
            if len(self._others) == _MOST_CASES:
                del self._others[next(iter(self._others))]
            self._others[key] = _Case()
        return self._others[key]

    def _read_surroundings(self, values: list[Any]) -> Surroundings:
        """What a call with some arguments comes with beside them; of ties, those that are gone."""
        kinds = self.walk.list_kinds()
        planned = getattr(self, "_surroundings", None)
        return Surroundings(
            read_autocast(),
            torch.get_default_dtype(),
            planned.kinds if planned and planned.kinds == kinds else kinds,  # held once
            self.walk.find_untied(self._ties),
            list_ties(list_tensors(values)),
        )

    def _explain(self, given: Mapping[str, Any], case: _Case, changed: Sequence[Place]) -> str:
        """Why a call is not the graph's."""
        if self._is_replaced:
            return _REPLACED
        decisive = self._planned.decisive | case.decisive
        named = next((place for place in changed if place in decisive), None)
        restless = self._find_restless(changed)
        planned, now = self._surroundings, self._read_surroundings([])
        if restless and not named and self._settings.freeze_values(changed) not in case.fits:
            return (
                f"{_write(restless)} changes from call to call, and the model's code reads it: this"
                " step runs without the plan (one of style 'modules' runs that code)"
            )
        if changed:
            difference = f"{_write(named or changed[0])} is not what it was for the plan"
        elif differs := write_surroundings(planned, now):
            difference = differs
        else:
            what, written = write_difference(self._expected, given)
            return (
                f"for arguments {what} the model's code does other things than for those of the"
                f" plan ({written}): this step runs without it"
            )
        return (
            f"{difference}, and the model's code may do other things with it: this step runs"
            " without the plan (one of style 'modules' runs that code)"
        )


class _Case:
    """What is known of calls with the same sizes, dtypes and structure, under the same autocast.

    Attributes:
        fits: By the values of attributes that changed, whether the graph is that of the call.
        reads: What the code reads where the graph fits; None where that is not known.
        decisive: Attributes that changed and that it read where the graph did not fit.
        is_met: Whether the model was traced for such a call.
    """

    def __init__(self, is_met: bool = False) -> None:
        self.fits: dict[tuple[Any, ...], bool] = {}
        self.reads: set[Read] | None = None
        self.decisive: set[Place] = set()
        self.is_met = is_met


def _write(place: Place) -> str:
    return ".".join(filter(None, place))


def _has_own_code(module: nn.Module) -> bool:
    """Whether a module's code is none of PyTorch's, which only calls other modules."""
    return not find_class(module).__module__.startswith("torch.nn")


def _list_coded(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """By name, the modules whose code was traced."""
    for name, module in model.named_modules():
        if not is_leaf(module):
            yield name, module
