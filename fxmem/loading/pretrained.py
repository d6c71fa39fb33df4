"""Pretrained models of transformers, as they load."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fxmem.errors import LoadError
from fxmem.kernels.stand_ins import tell
from fxmem.patching import patch
from fxmem.tracing.compiled import patch_when_imported

_ASYNC = "HF_DEACTIVATE_ASYNC_LOAD"
_MISSING = "weights that are missing"


@contextlib.contextmanager
def load_pretrained() -> Iterator[None]:
    """Lets ``from_pretrained`` load a weight at a time, and make weights that are not here, within.

    Threads would run ahead as far as the machine lets them. Source: ``from_pretrained`` in
    ``transformers/modeling_utils.py``, ``spawn_materialize`` in ``core_model_loading.py``, 5.23.
    """
    is_unset = _ASYNC not in os.environ
    os.environ.setdefault(_ASYNC, "1")
    try:
        with patch_when_imported("transformers.modeling_utils", _replace_loading):
            yield
    finally:
        if is_unset:
            os.environ.pop(_ASYNC, None)


def _replace_loading(module: ModuleType) -> contextlib.AbstractContextManager[None]:
    modeling: Any = module
    if not hasattr(modeling, "_get_resolved_checkpoint_files"):  # before transformers 4.50
        return contextlib.nullcontext()
    kind: Any = modeling.PreTrainedModel
    find_files: Any = modeling._get_resolved_checkpoint_files
    load: Any = vars(kind)["_load_pretrained_model"]  # of the class in transformers 4
    # Checkpoints have the experts of a layer one by one, and loading stacks them.
    as_saved: Any = getattr(modeling, "revert_weight_conversion", lambda _model, state: state)

    @functools.wraps(find_files)
    def find_or_pass(*args: Any, **kwargs: Any) -> Any:
        try:
            return find_files(*args, **kwargs)
        except OSError:
            name = args[0] if args else kwargs["pretrained_model_name_or_path"]
            tell(f"No weights of {name} are here: they were made as its configuration says.")
            return [_MISSING], None

    @functools.wraps(load.__func__)
    def load_or_make(model: nn.Module, state: Any, files: Any, *args: Any, **kwargs: Any) -> Any:
        if files == [_MISSING]:
            quantizer = kwargs.get("hf_quantizer") or getattr(args[0], "hf_quantizer", None)
            if quantizer is not None and quantizer.pre_quantized:
                config: Any = model.config
                raise LoadError(
                    f"no weights of {config.name_or_path} are here, and they are quantized already",
                    hint="download them, or quantize others as they load: quantization_config=",
                )
            saved = as_saved(model, model.state_dict())
            state, files = {name: _make_zeros(saved[name]) for name in sorted(saved)}, None
        return load.__get__(None, type(model))(model, state, files, *args, **kwargs)

    return patch(
        {
            modeling: {"_get_resolved_checkpoint_files": find_or_pass},
            kind: {"_load_pretrained_model": staticmethod(load_or_make)},
        }
    )


def _make_zeros(tensor: Tensor) -> Tensor:
    """Makes zeros like a tensor on the host, which take no memory until they are written."""
    import numpy

    zeros = torch.from_numpy(numpy.zeros(tensor.nbytes, numpy.uint8))
    return zeros.view(tensor.dtype).view(tensor.shape)
