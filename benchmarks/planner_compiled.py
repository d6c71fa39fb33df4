"""Models under ``torch.compile`` with PyTorch's own ``activation_memory_budget``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config
from functorch.compile import min_cut_rematerialization_partition
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.compile_fx import select_decomp_table
from torch.fx.graph import _BoxedCodeGen
from torch.utils.flop_counter import FlopCounterMode

BUDGETS = (0.75, 0.5, 0.25, 0.1, 0.0)


class CompiledModel:
    """A compiled model whose graphs run operator by operator, as PyTorch partitioned them.

    What is computed again is decided as for inductor, whose kernels take minutes to make. A
    compiler steps aside while FLOPs are counted around it, so they are counted in its graphs.

    Args:
        model: The model.
        budget: The share of the activations that may be kept.
    """

    def __init__(self, model: nn.Module, budget: float) -> None:
        torch.compiler.reset()
        backend = aot_autograd(
            fw_compiler=self._keep_graph,
            bw_compiler=self._keep_graph,
            partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )
        self._compiled = torch.compile(model, backend=backend)
        self._budget = budget
        self._flops: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model."""
        with functorch_config.patch(activation_memory_budget=self._budget):
            return self._compiled(*args, **kwargs)

    def count_flops(self, run: Callable[[], Any]) -> int:
        """FLOPs of what its graphs do while something runs."""
        self._flops = 0
        try:
            run()
            return self._flops
        finally:
            self._flops = None

    def _keep_graph(self, graph: fx.GraphModule, _: Any) -> Any:
        # As PyTorch's own, which take arguments in a list so as to let go of them one by one.
        graph.graph.set_codegen(_BoxedCodeGen())
        graph.recompile()

        def run(args: list[Any]) -> Any:
            if self._flops is None:
                return graph(args)
            with FlopCounterMode(display=False) as counter:
                result = graph(args)
            self._flops += int(counter.get_total_flops())
            return result

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def list_compiled() -> Iterator[tuple[str, Callable[[nn.Module], CompiledModel]]]:
    """PyTorch's own budgets, by name."""
    for budget in BUDGETS:
        yield f"budget {budget}, compiled", lambda model, b=budget: CompiledModel(model, b)
