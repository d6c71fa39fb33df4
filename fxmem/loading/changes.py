"""Ways to train the user's model in less memory, as people combine them: ``--try``.

Nothing here imports torch before a model is changed.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fxmem.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

_RANK = 16
_ADAMS = ("adam", "adamw")
_BLOCKS = 2


def add_lora(model: nn.Module) -> nn.Module:
    """Freezes the model, and adds peft's LoRA of rank 16 to its linear layers but the last."""
    return _add_adapters(model, [name for name, _ in _list_linear(model)])


def _add_adapters(model: nn.Module, names: Sequence[str]) -> nn.Module:
    peft: Any = _import_package("peft", "lora")
    config = peft.LoraConfig(r=_RANK, lora_alpha=_RANK, target_modules=[*names])
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def add_qlora(model: nn.Module) -> nn.Module:
    """Packs the linear layers but the last into 4 bits (NF4, doubly quantized), then adds LoRA."""
    import torch

    bitsandbytes: Any = _import_package("bitsandbytes", "qlora")
    layers = _list_linear(model)
    for name, layer in layers:
        packed = bitsandbytes.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=torch.bfloat16,
            quant_type="nf4",
        )
        packed.weight = bitsandbytes.nn.Params4bit(
            layer.weight.data, requires_grad=False, quant_type="nf4", module=packed
        )
        packed.bias = layer.bias
        model.set_submodule(name, packed)
    return _add_adapters(model.cuda(), [name for name, _ in layers])


def add_checkpoints(model: nn.Module) -> nn.Module:
    """Puts each block of the model into a checkpoint: transformers' own way where there is one."""
    enable: Any = getattr(model, "gradient_checkpointing_enable", None)
    if enable is not None:
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model
    wrapping: Any = importlib.import_module(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
    )
    blocks = _list_blocks(model)
    if not blocks:
        raise UsageError(
            "--try checkpoint: the model has no list of blocks of one class",
            hint="fxmem plan finds what to compute again in any model",
        )
    for name, block in blocks:
        model.set_submodule(name, wrapping.checkpoint_wrapper(block))
    return model


CHANGES: Mapping[str, Callable[[nn.Module], nn.Module] | None] = {
    "lora": add_lora,
    "qlora": add_qlora,
    "checkpoint": add_checkpoints,
    "8bit": None,  # of the optimizer
}
"""What ``--try`` takes, in the order in which a model is changed."""


def list_combinations(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Lists the ways to combine changes, none first; LoRA and QLoRA exclude each other.

    Raises:
        UsageError: There is no such change.

    >>> list_combinations(["lora", "checkpoint"])
    [(), ('lora',), ('checkpoint',), ('lora', 'checkpoint')]
    """
    for name in names:
        if name not in CHANGES:
            raise UsageError(f"--try {name}: no such change", hint=" or ".join(CHANGES))
    known = [name for name in CHANGES if name in names]
    sizes = range(len(known) + 1)
    found = (each for n in sizes for each in itertools.combinations(known, n))
    return [each for each in found if not {"lora", "qlora"} <= {*each}]


def change_optimizer(optimizer: str | None, changes: Iterable[str]) -> str | None:
    """Chooses Adam with states in 8 bits for Adam and AdamW, which hold as much.

    Raises:
        UsageError: Another optimizer has none.
    """
    if "8bit" not in changes:
        return optimizer
    if optimizer not in _ADAMS:
        raise UsageError(f"--try 8bit with --optimizer {optimizer}", hint="adam or adamw")
    return "adam8bit"


def write_changed(target: str, changes: Sequence[str]) -> str:
    """Writes the TARGET that is the model of another, changed.

    >>> write_changed("gpt.py:GPT(layers=2)", ["lora"])
    "fxmem.loading.changes:build_changed('gpt.py:GPT(layers=2)', 'lora')"
    """
    return f"{__name__}:{build_changed.__name__}({target!r}, {','.join(changes)!r})"


def build_changed(target: str, changes: str) -> nn.Module:
    """Builds the model of a TARGET with changes, named with commas between."""
    from fxmem.loading.target import load_target

    model = load_target(target, None)
    names = changes.split(",")
    # LoRA goes last: it looks for layers, and wraps the model.
    for name in sorted(names, key=lambda name: name in ("lora", "qlora")):
        change = CHANGES[name]
        model = model if change is None else change(model)
    return model


def _list_linear(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Lists the linear layers but the head: the last of a model that has more than one."""
    from torch import nn

    found = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear and name]
    return found[:-1] if len(found) > 1 else found


def _list_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Lists the members of the list with the most modules of one class."""
    from torch import nn

    lists = [
        (name, [*module.named_children()])
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
    ]
    alike = [
        (name, blocks)
        for name, blocks in lists
        if len(blocks) >= _BLOCKS and len({type(block) for _, block in blocks}) == 1
    ]
    name, blocks = max(alike, key=lambda each: len(each[1]), default=("", []))
    return [(f"{name}.{key}".strip("."), block) for key, block in blocks]


def _import_package(package: str, change: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise UsageError(
            f"--try {change} needs {package}, which is not installed",
            hint=f"pip install --no-deps {package}",
        ) from error
