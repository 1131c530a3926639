"""Architectures of torchvision: the smallest of each file, random weights."""

from __future__ import annotations

import torch
from torch import nn

from tests.sweep.packages import import_torchvision
from tests.sweep.subject import NotMade, Subject, deterministic, noise, stirred, variant_of

# name: the shape of its input
IMAGE, LARGE, CLIP = (4, 3, 64, 64), (2, 3, 96, 96), (2, 3, 4, 32, 32)
SHAPES: dict[str, tuple[int, ...]] = {
    "alexnet": IMAGE,
    "convnext_tiny": IMAGE,
    "densenet121": IMAGE,
    "efficientnet_b0": IMAGE,
    "efficientnet_v2_s": IMAGE,
    "googlenet": IMAGE,
    "inception_v3": (2, 3, 80, 80),
    "maxvit_t": (2, 3, 224, 224),
    "mnasnet0_5": IMAGE,
    "mobilenet_v2": IMAGE,
    "mobilenet_v3_small": IMAGE,
    "regnet_x_400mf": IMAGE,
    "regnet_y_400mf": IMAGE,
    "resnet18": IMAGE,
    "resnet50": IMAGE,
    "resnext50_32x4d": IMAGE,
    "shufflenet_v2_x0_5": IMAGE,
    "squeezenet1_1": IMAGE,
    "swin_t": IMAGE,
    "swin_v2_t": IMAGE,
    "vgg11_bn": (4, 3, 32, 32),
    "vit_b_32": (2, 3, 224, 224),
    "deeplabv3_mobilenet_v3_large": LARGE,
    "fcn_resnet50": IMAGE,
    "lraspp_mobilenet_v3_large": LARGE,
    "mc3_18": CLIP,
    "r2plus1d_18": CLIP,
    "r3d_18": CLIP,
    "s3d": (2, 3, 16, 64, 64),
    "swin3d_t": CLIP,
    "raft_small": (1, 3, 128, 128),
}
LEFT_OUT = {
    "fasterrcnn_resnet50_fpn": "detection: results of a size that data decide, and lists of images",
    "fcos_resnet50_fpn": "detection",
    "keypointrcnn_resnet50_fpn": "detection",
    "maskrcnn_resnet50_fpn": "detection",
    "retinanet_resnet50_fpn": "detection",
    "ssd300_vgg16": "detection",
    "ssdlite320_mobilenet_v3_large": "detection",
    "quantized_resnet18": "quantised: eager and compiled modules differ by design",
    "mvit_v1_b": "its smallest input, 16 images of 224 x 224, takes minutes in float64",
}


def names() -> list[str]:
    import_torchvision()
    return sorted({*SHAPES, *LEFT_OUT})


def make(name: str, variant: str) -> Subject:
    if name in LEFT_OUT:
        raise NotMade(LEFT_OUT[name])
    import_torchvision()
    import torchvision

    torch.manual_seed(0)
    model = built(torchvision, name)
    images = noise(*SHAPES[name])
    args = (images, images.flip(-1)) if name.startswith("raft") else (images,)
    return variant_of(Subject(stirred(deterministic(model)).eval(), (args, {})), variant)


def built(torchvision: object, name: str) -> nn.Module:
    settings: dict[str, object] = {"weights": None}
    if name in ("googlenet", "inception_v3"):
        settings["init_weights"] = False  # its truncated normal distribution takes a minute
    if "_mobilenet_v3_large" in name or name == "fcn_resnet50":
        settings["weights_backbone"] = None
    return torchvision.models.get_model(name, **settings)  # type: ignore[attr-defined,no-any-return]
