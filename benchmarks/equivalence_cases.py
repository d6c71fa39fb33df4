"""The models of the equivalence suite, small enough for three steps of many plans each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from benchmarks import equivalence_models as hard
from benchmarks import hugging_face
from benchmarks.cases import Case, Spec, ids, image, import_torchvision, timm_model, vision
from benchmarks.models import OWN

_HUGGING_FACE = """
    gpt2 gpt_neo llama gemma2 mixtral mamba mpt bert distilbert albert deberta_v2 xlnet t5 bart vit
    swin convnext resnet segformer wav2vec2 whisper clip patchtst
"""
_LEFT_OUT = ("checkpoint_reentrant", "unet")
"""The accuracy benchmark's own models that no plan runs, and those that are smaller here."""


def _torchvision(name: str, **kwargs: Any) -> Callable[[], nn.Module]:
    """A class or function of torchvision's models with sizes of its own."""

    def build() -> nn.Module:
        model: nn.Module = getattr(import_torchvision().models, name)(**kwargs)
        return model

    return build


def _small_vgg() -> nn.Module:
    make_layers = import_torchvision().models.vgg.make_layers
    features = make_layers([8, "M", 16, 16, "M", 32], batch_norm=True)
    return nn.Sequential(
        features, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(True),
        nn.Dropout(), nn.Linear(64, 10),
    )  # fmt: skip


def _small_unet() -> nn.Module:
    from benchmarks.own_models import UNet

    return UNet(channels=8, depth=2)


def _swish_mlp() -> nn.Module:
    from benchmarks.own_models import mlp

    return nn.Sequential(*(mlp(32, 128, dropout=0.1) for _ in range(4)))


TORCHVISION = [
    Case("resnet18", vision("resnet18"), (image(2, 3, 32, 32),)),
    Case(
        "resnet_bottleneck",
        lambda: import_torchvision().models.ResNet(
            import_torchvision().models.resnet.Bottleneck, [1, 1, 1, 1], zero_init_residual=True
        ),
        (image(2, 3, 32, 32),),
    ),
    Case(
        "densenet",
        _torchvision(
            "DenseNet", growth_rate=8, block_config=(2, 3), num_init_features=8, drop_rate=0.1
        ),
        (image(2, 3, 32, 32),),
    ),
    Case("vgg_bn", _small_vgg, (image(2, 3, 32, 32),)),
    Case("mobilenet_v3_small", vision("mobilenet_v3_small"), (image(2, 3, 32, 32),)),
    Case("efficientnet_b0", vision("efficientnet_b0"), (image(2, 3, 32, 32),)),
    Case("shufflenet_v2", vision("shufflenet_v2_x0_5"), (image(2, 3, 32, 32),)),
    Case("squeezenet", vision("squeezenet1_1"), (image(2, 3, 64, 64),)),
    Case("regnet_y_400mf", vision("regnet_y_400mf"), (image(2, 3, 32, 32),)),
    Case("mnasnet", vision("mnasnet0_5"), (image(2, 3, 32, 32),)),
    Case("googlenet_aux", vision("googlenet", init_weights=False), (image(2, 3, 96, 96),)),
    Case(
        "swin",
        _torchvision(
            "SwinTransformer",
            patch_size=[4, 4],
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=[4, 4],
            dropout=0.1,
            stochastic_depth_prob=0.2,
        ),
        (image(2, 3, 32, 32),),
    ),
    Case(
        "vision_transformer",
        _torchvision(
            "VisionTransformer",
            image_size=32,
            patch_size=8,
            num_layers=2,
            num_heads=2,
            hidden_dim=32,
            mlp_dim=64,
            dropout=0.1,
            attention_dropout=0.1,
        ),
        (image(2, 3, 32, 32),),
    ),
    Case(
        "lraspp",
        vision("lraspp_mobilenet_v3_large", weights_backbone=None),
        (image(2, 3, 64, 64),),
    ),
]

_TIMM_NAMES = (
    "test_resnet test_efficientnet test_efficientnet_gn test_nfnet test_byobnet test_convnext"
    " test_convnext2 test_mambaout"
)
TIMM = [
    *(Case(f"timm_{n}", timm_model(n), (image(2, 3, 64, 64),)) for n in _TIMM_NAMES.split()),
    *(
        Case(f"timm_{n}", timm_model(n, img_size=32), (image(2, 3, 32, 32),))
        for n in ("test_vit", "test_vit3")
    ),
    Case(
        "timm_resnet10t_drop", timm_model("resnet10t", drop_path_rate=0.3), (image(2, 3, 64, 64),)
    ),
]

HUGGING_FACE = [
    case for case in hugging_face.cases() if case.name.removeprefix("hf/") in _HUGGING_FACE.split()
]
HUGGING_FACE += [
    Case(
        "hf/gpt2 without a cache",
        HUGGING_FACE[0].build,
        kwargs={"input_ids": ids(2, 16), "labels": ids(2, 16), "use_cache": False},
    ),
    Case(
        "hf/llama with a mask",
        next(case for case in HUGGING_FACE if case.name == "hf/llama").build,
        kwargs={
            "input_ids": ids(2, 16),
            "attention_mask": Spec((2, 16), torch.int64, 2),
            "use_cache": False,
            "output_hidden_states": True,
        },
    ),
]

_IMAGE = (image(2, 3, 16, 16),)
_ROWS = (image(16, 32),)
HARD = [
    Case("unet", _small_unet, (image(2, 3, 32, 32),)),
    Case("mlps_dropout", _swish_mlp, _ROWS),
    Case("norms_train", partial(hard.Normalised, nn.BatchNorm2d), _IMAGE),
    Case("norms_frozen", hard.FrozenNorms, _IMAGE),
    Case("norms_half_frozen", hard.HalfFrozen, _IMAGE),
    Case(
        "norms_no_momentum",
        partial(hard.Normalised, partial(nn.BatchNorm2d, momentum=None)),
        _IMAGE,
    ),
    Case(
        "norms_untracked",
        partial(hard.Normalised, partial(nn.BatchNorm2d, track_running_stats=False)),
        _IMAGE,
    ),
    Case("norms_sync", partial(hard.Normalised, nn.SyncBatchNorm), _IMAGE),
    Case(
        "norms_instance",
        partial(hard.Normalised, partial(nn.InstanceNorm2d, track_running_stats=True)),
        _IMAGE,
    ),
    Case("spectral_norm_old", partial(hard.Reparametrized, spectral_norm), _ROWS),
    Case("spectral_norm_new", partial(hard.Reparametrized, parametrizations.spectral_norm), _ROWS),
    Case("weight_norm_old", partial(hard.Reparametrized, weight_norm), _ROWS),
    Case("weight_norm_new", partial(hard.Reparametrized, parametrizations.weight_norm), _ROWS),
    Case("orthogonal", partial(hard.Reparametrized, parametrizations.orthogonal), _ROWS),
    Case("parametrization", partial(hard.Reparametrized, hard.make_symmetric), _ROWS),
    Case("containers", hard.Containers, (image(16, 24),)),
    Case(
        "arguments",
        hard.Arguments,
        (image(16, 32), image(16, 32)),
        {"bias": image(32, requires_grad=True), "flag": False},
    ),
    Case("arguments_none", hard.Arguments, (image(16, 32), None), {"bias": image(32)}),
    Case("aliases", hard.Aliases, (image(16, 32, requires_grad=True),)),
    Case("writes_input", hard.WritesInput, _ROWS),
    Case("in_place_blocks", hard.InPlaceBlocks, _ROWS),
    Case("noise", hard.Noise, (image(16, 8, 32),)),
    Case("counting", hard.Counting, _ROWS),
    Case("closure", hard.Closure, _ROWS),
    Case("data_dependent", hard.DataDependent, _ROWS),
    Case("autocast_inside", hard.AutocastInside, _ROWS),
    Case("cached", hard.Cached, (image(2, 8, 16),)),
    Case("slopes", hard.Slopes, _ROWS),
    Case("nested_output", hard.NestedOutput, (image(8, 24),)),
    Case("complex_and_double", hard.ComplexAndDouble, _ROWS),
    Case("ragged", hard.Ragged, (ids(4, 7, high=50),)),
    Case("one_operation", lambda: nn.Linear(8, 8), (image(4, 8),)),
    Case(
        "activation_first", lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(32, 32)), _ROWS
    ),
]

_PLAIN = (
    *TORCHVISION,
    *TIMM,
    *HUGGING_FACE,
    *(case for case in OWN if case.name not in _LEFT_OUT),
    *HARD,
)
_AUTOCAST_NAMES = """
    resnet18 swin vision_transformer hf/gpt2 hf/bert hf/t5 lstm reused_module tied_weights aliases
    mlps_dropout noise
""".split()
AUTOCAST = [
    replace(case, name=f"{case.name} bf16", autocast=torch.bfloat16)
    for case in (
        *(case for case in _PLAIN if case.name in _AUTOCAST_NAMES),
        Case("unrolled", hard.Unrolled, _ROWS),
        Case("adapted", hard.Adapted, _ROWS),
    )
]

CASES: tuple[Case, ...] = (*_PLAIN, *AUTOCAST)
