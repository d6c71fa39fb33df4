"""The model libraries of the coverage benchmark, as cases.

Names are `suite/model`. Nothing is imported before a suite is asked for.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks import hugging_face
from benchmarks.cases import Boxes, Case, Spec, image, import_torchvision, timm_model, vision

SUITES = ("torchvision", "timm", "hf")

# The smallest model (by parameters, made-for-testing ones left out) of each module of timm, by
# the side of the images that it takes.
TIMM: dict[int, str] = {
    176: "resnet10t",
    192: "nf_regnet_b0",
    224: """
        beit_base_patch16_224 mobileone_s1 cait_xxs24_224 coat_tiny convit_tiny
        convmixer_768_32 convnext_zepto_rms cpubone_nano cspnext_tiny davit_tiny
        deit_tiny_patch16_224 densenet121 dla46x_c dpn48b efficientformer_l1
        efficientformerv2_s0 mobilenetv2_035 efficientvim_m1 efficientvit_b0 efficientvit_m0
        fasternet_t0 focalnet_tiny_srf gcvit_xxtiny ghostnet_050 hardcorenas_b hgnetv2_b0
        hiera_tiny_224 hrnet_w18_small iformer_t inception_next_atto lcnetv2_small levit_128s
        lowformer_b0 mambaout_femto poolformerv2_s12 gmlp_ti16_224 mobilenetv3_small_050
        mvitv2_tiny nest_tiny nextvit_small pit_ti_224 pvt_v2_b0 rdnet_tiny regnetx_002
        repghostnet_050 repvit_m1 res2next50 resnest14d resnetv2_18 rexnet_100 selecsls42
        legacy_seresnet18 sequencer2d_s shvit_s1 skresnet18 starnet_s050 swiftformer_xs
        swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 tiny_vit_5m_224
        tnt_s_legacy_patch16_224 tresnet_m twins_svt_small vgg11 visformer_tiny
        vit_tiny_patch16_224 vit_tiny_r_s16_p8_224 vit_srelpos_small_patch16_224
        samvit_base_patch16_224 vitamin_small_224 volo_d1_224 ese_vovnet19b_slim_dw
        xcit_nano_12_p8_224
    """,
    240: "crossvit_tiny_240",
    256: """
        halonet_h1 cs3darknet_focus_s edgenext_xx_small vit_tiny_patch16_dinov3_qkvb
        fastvit_t8 maxvit_pico_rw_256 mobilenetv5_base mobilevit_xxs swinv2_tiny_window8_256
    """,
    299: "inception_resnet_v2 inception_v3 inception_v4 legacy_xception xception41p",
    331: "nasnetalarge pnasnet5large",
    384: "naflexvit_base_patch16_parfac_gap",
    512: "csatv2",
    546: "deepseek_vit_412m",
    768: "gemma4_vit_167m qwen3_vit_88m",
    896: "sam2_hiera_tiny",
}

# torchvision models that take something other than 224 x 224 images.
SHAPES: dict[str, tuple[int, ...]] = {
    "inception_v3": (2, 3, 299, 299),
    "quantized_inception_v3": (2, 3, 299, 299),
    "mvit_v1_b": (1, 3, 16, 224, 224),
    "mvit_v2_s": (1, 3, 16, 224, 224),
    "s3d": (1, 3, 16, 224, 224),
}
VIDEO = ("mc3_18", "r2plus1d_18", "r3d_18", "swin3d_b", "swin3d_s", "swin3d_t")
DETECTION = ("rcnn", "fcos", "retinanet", "ssd")


def suite_cases(suite: str) -> list[Case]:
    """Returns the cases of one of `SUITES`.

    Raises:
        ValueError: There is no such suite.
    """
    if suite == "torchvision":
        return [_torchvision(name) for name in import_torchvision().models.list_models()]
    if suite == "timm":
        return [
            Case(f"timm/{name}", timm_model(name), (image(2, 3, side, side),))
            for side, names in TIMM.items()
            for name in names.split()
        ]
    if suite == "hf":
        return hugging_face.cases()
    raise ValueError(f"no suite {suite!r}; there are {', '.join(SUITES)}")


def _torchvision(name: str) -> Case:
    label = f"torchvision/{name}"
    if any(word in name for word in DETECTION):
        build = vision(name, weights_backbone=None)
        return Case(label, build, ([image(3, 320, 320)], [_target(name)]))
    if name.startswith("quantized_"):
        model = name.removeprefix("quantized_")
        extra: dict[str, Any] = {"quantize": False}  # as quantization-aware training has it
        if model in ("googlenet", "inception_v3"):
            extra["init_weights"] = False
        return Case(label, vision(name, **extra), (image(*SHAPES.get(name, (2, 3, 224, 224))),))
    if name.startswith("raft"):
        frames = (image(1, 3, 128, 128), image(1, 3, 128, 128))
        return Case(label, vision(name), frames, {"num_flow_updates": 3})
    options: dict[str, Any] = {}
    if name.startswith(("deeplabv3", "fcn", "lraspp")):
        options["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False  # the initialisation takes a minute
    shape = (1, 3, 8, 112, 112) if name in VIDEO else SHAPES.get(name, (2, 3, 224, 224))
    return Case(label, vision(name, **options), (image(*shape),))


def _target(name: str) -> dict[str, Any]:
    target: dict[str, Any] = {"boxes": Boxes((1, 4)), "labels": Spec((1,), torch.int64, 2)}
    if name.startswith("maskrcnn"):
        target["masks"] = Spec((1, 320, 320), torch.uint8, 2)
    if name.startswith("keypointrcnn"):
        target["keypoints"] = image(1, 17, 3)
    return target
