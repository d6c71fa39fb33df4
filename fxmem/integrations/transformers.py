"""A callback that checks the first step of ``transformers.Trainer``, and can apply a plan."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

from fxmem.applying.auto import prepare_first_step
from fxmem.integrations.first_step import FirstStep, describe_optimizer
from fxmem.setup import Loop


class FxmemCallback(FirstStep, transformers.TrainerCallback):
    """Analyses the first training step of a ``Trainer`` before it runs.

    The step is that of the trainer: its model and inputs, optimizer, mixed precision,
    accumulation and clipping. With ``apply=True`` the model runs by a plan; the model's outputs
    are then without a cache, as under ``gradient_checkpointing_enable()``. Arguments are those of
    :class:`FirstStep`::

        Trainer(model, arguments, callbacks=[FxmemCallback(budget="20GiB", apply=True)])
    """

    _model: nn.Module | None = None
    _found: dict[str, Any]

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prepares the model, before accelerate lays autocast around its ``forward``."""
        self._prepare(kwargs.get("model"))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes from the trainer what decides the memory of its steps."""
        model = kwargs["model"]
        self._prepare(model)
        optimizer: Any = kwargs["optimizer"]
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's is around it
        self._found = {
            "optimizer": describe_optimizer(optimizer, model),
            "loop": Loop(
                "huggingface",
                {
                    "accumulate": args.gradient_accumulation_steps,
                    "clip_grad": bool(args.max_grad_norm and args.max_grad_norm > 0),
                },
            ),
            "autocast": "bf16" if args.bf16 else "fp16" if args.fp16 else None,
        }

    def _prepare(self, model: nn.Module | None) -> None:
        if model is None or model is self._model:
            return
        self._model = model
        config: Any = getattr(model, "config", None)
        if self._applies and getattr(config, "use_cache", False):
            config.use_cache = False
        prepare_first_step(model, self._check_step)

    def _check_step(self, model: nn.Module, args: Any, kwargs: Any) -> nn.Module:
        return self.check(model, args, kwargs, **self._found)
