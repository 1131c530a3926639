"""Architectures of torchvision: the smallest of each file, random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.sweep.packages import import_torchvision
from tests.sweep.subject import (
    NotMade,
    Subject,
    deterministic,
    noise,
    shallower,
    stirred,
    variant_of,
)

# name: the shape of its input
IMAGE, LARGE, CLIP = (4, 3, 64, 64), (2, 3, 96, 96), (4, 3, 4, 32, 32)
SHAPES: dict[str, tuple[int, ...]] = {
    "alexnet": IMAGE,
    "convnext_tiny": IMAGE,
    "densenet121": IMAGE,
    "efficientnet_b0": IMAGE,
    "efficientnet_v2_s": IMAGE,
    "googlenet": IMAGE,
    "inception_v3": (2, 3, 80, 80),
    "maxvit_t": (2, 3, 64, 64),
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
    "vit_b_32": (2, 3, 64, 64),
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
NUM_CLASSES = 10
MAXVIT: dict[str, Any] = {
    "input_size": (64, 64),
    "stem_channels": 16,
    "partition_size": 2,
    "block_channels": [16, 32],
    "block_layers": [1, 1],
    "head_dim": 8,
    "stochastic_depth_prob": 0.0,
    "num_classes": NUM_CLASSES,
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

    images = noise(*SHAPES[name])
    pair = (images, images.flip(-1)) if name.startswith("raft") else (images,)
    call = (pair, {"num_flow_updates": 2} if name.startswith("raft") else {})

    def subject(change: Callable[[nn.Module], nn.Module], recipe: str) -> Subject:
        torch.manual_seed(0)
        model = stirred(deterministic(built(torchvision, name)))
        return variant_of(Subject(change(model).eval(), call, recipe), variant)

    try:
        return subject(shallower, "no block twice")
    except (RuntimeError, ValueError):
        return subject(lambda model: model, "")


def built(torchvision: Any, name: str) -> nn.Module:
    settings: dict[str, Any] = {"weights": None, "num_classes": NUM_CLASSES}
    if name == "maxvit_t":
        return torchvision.models.MaxVit(**MAXVIT)  # type: ignore[no-any-return]
    if name.startswith("raft"):
        del settings["num_classes"]
    if name == "vit_b_32":
        settings["image_size"] = SHAPES[name][-1]
    if name in ("googlenet", "inception_v3"):
        settings["init_weights"] = False  # its truncated normal distribution takes a minute
    if name == "inception_v3":
        settings["aux_logits"] = False  # its second head needs larger images
    if "_mobilenet_v3_large" in name or name == "fcn_resnet50":
        settings["weights_backbone"] = None
    return with_small_head(torchvision.models.get_model(name, **settings), name)


def with_small_head(model: Any, name: str) -> nn.Module:
    """Heads that have most of the parameters, or that are made for large images only."""
    if name in ("alexnet", "vgg11_bn"):
        model.avgpool = nn.AdaptiveAvgPool2d(2)
        channels = 4 * next(m.out_channels for m in reversed(model.features) if is_conv(m))
        for i, layer in enumerate(model.classifier):
            if isinstance(layer, nn.Linear):
                width = NUM_CLASSES if i == len(model.classifier) - 1 else 64
                model.classifier[i] = nn.Linear(channels, width)
                channels = width
    if name == "s3d":
        model.avgpool = nn.AvgPool3d((2, 2, 2), stride=1)
    return model  # type: ignore[no-any-return]


def is_conv(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d)
