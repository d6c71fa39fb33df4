"""A callback that checks the first step of ``lightning.Trainer``, and can apply a plan."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import lightning
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from fxmem.applying.planned_model import run_by_plan
from fxmem.integrations.first_step import FirstStep, describe_optimizer
from fxmem.patching import patch
from fxmem.planning.plan import MODULES
from fxmem.setup import Loop

_PRECISIONS = {"bf16-mixed": "bf16", "16-mixed": "fp16"}
_REPORTS = ("log", "log_dict", "print")
"""Methods of a LightningModule that hand tensors to the trainer."""


class FxmemCallback(FirstStep, lightning.Callback):
    """Analyses the first ``training_step`` of a ``LightningModule`` before it runs.

    The step is that of the trainer: the batch, optimizer, mixed precision, accumulation and
    clipping. With ``apply=True`` a plan of whole modules is applied to the steps of training.
    Arguments are those of :class:`FirstStep`::

        lightning.Trainer(callbacks=[FxmemCallback(budget="20GiB", apply=True)])
    """

    _is_checked = False

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Checks the step that is about to run, if none was before."""
        if self._is_checked or not pl_module.automatic_optimization:
            return
        self._is_checked = True
        step = _TrainingStep(pl_module)
        clip = trainer.gradient_clip_val
        with patch({pl_module: dict.fromkeys(_REPORTS, lambda *_, **__: None)}):
            planned = self.check(
                step,
                (batch, batch_idx),
                {},
                MODULES,
                optimizer=describe_optimizer(trainer.optimizers[0], pl_module),
                loop=Loop(
                    "lightning",
                    {"accumulate": trainer.accumulate_grad_batches, "clip_grad": bool(clip)},
                ),
                autocast=_PRECISIONS.get(str(trainer.precision)),
            )
        if planned is not step:
            _run_by_plan(pl_module, planned)


class _TrainingStep(nn.Module):
    """The ``training_step`` of a LightningModule as the forward of a model."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any, batch_idx: int) -> Any:
        step = self.module.training_step
        takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        output = step(batch, batch_idx) if takes_index else step(batch)
        return output["loss"] if isinstance(output, Mapping) else output


def _run_by_plan(module: Any, planned: nn.Module) -> None:
    own = module.training_step

    @functools.wraps(own)
    def training_step(*args: Any, **kwargs: Any) -> Any:
        return run_by_plan(planned, own, *args, **kwargs)

    vars(module)["training_step"] = training_step
