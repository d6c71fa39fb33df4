"""A model laid out on a mesh, by the user's function or in the plain way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxmem.errors import TraceError, UsageError
from fxmem.parallelism.checkpointing import checkpoint_blocks, find_blocks
from fxmem.parallelism.layout import NO_KNOBS, Knobs


def copy_model(model: nn.Module) -> nn.Module:
    """Copies a model on fake tensors, so that what wraps the copy leaves the model as it is."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        with torch.no_grad():
            copied_tensor: Any = tensor.clone()
        if isinstance(tensor, nn.Parameter):
            copied_tensor = nn.Parameter(copied_tensor, tensor.requires_grad)
        memo[id(tensor)] = copied_tensor
    return copy.deepcopy(model, memo)


def parallelize_model(
    model: nn.Module,
    parallelize: Any,
    mesh: DeviceMesh,
    knobs: Knobs = NO_KNOBS,
) -> nn.Module:
    """Lays a model out on a mesh, by a function or by the name of a plain way.

    Raises:
        TraceError: The function returns something else than a module or None.
    """
    blocks = find_blocks(model)
    if parallelize == "fsdp":
        dtype = None if knobs.param_dtype is None else getattr(torch, knobs.param_dtype)
        result: Any = shard_blocks(
            model, mesh, reshards=knobs.reshards, param_dtype=dtype, offloads=knobs.offloads
        )
    else:
        result = (replicate if parallelize == "ddp" else parallelize)(model, mesh)
    if result is not None and not isinstance(result, nn.Module):
        raise TraceError(
            f"parallelize returned a {type(result).__name__}, not a module",
            hint="return the model, or None where it is changed in place",
        )
    laid_out = model if result is None else result
    checkpoint_blocks(laid_out, knobs.checkpoint, blocks)
    return laid_out


def shard_blocks(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    reshards: bool = True,
    param_dtype: torch.dtype | None = None,
    offloads: bool = False,
) -> nn.Module:
    """Shards a model by ``fully_shard``: each of its repeated blocks, then the root.

    Args:
        model: The model, which is changed in place.
        mesh: Of one dimension; or of two, the first of which replicates the shards.
        reshards: Whether blocks free their parameters between forward and backward.
        param_dtype: Of parameters and activations, with gradients reduced in float32; None for
            their own.
        offloads: Whether shards, gradients and the optimizer's state lie in the host's memory.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": mesh}
    if param_dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype, reduce_dtype=torch.float32)
    if offloads:
        options["offload_policy"] = CPUOffloadPolicy()
    for block in find_blocks(model):
        fully_shard(block, reshard_after_forward=reshards, **options)
    fully_shard(model, **options)
    return model


def replicate(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Wraps a model in ``DistributedDataParallel``."""
    if mesh.ndim > 1:
        raise UsageError(f"ddp on a mesh of {mesh.ndim} dimensions", hint="ddp takes one")
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())


def shard_optimizer(make: Callable[[list[nn.Parameter]], Any]) -> Callable[[Any], Any]:
    """Shards an optimizer's state over the ranks, by ``ZeroRedundancyOptimizer``."""

    def make_sharded(parameters: list[nn.Parameter]) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        def make_part(groups: Any) -> Any:
            return make([parameter for group in groups for parameter in group["params"]])

        return ZeroRedundancyOptimizer(parameters, optimizer_class=make_part)  # type: ignore

    return make_sharded
