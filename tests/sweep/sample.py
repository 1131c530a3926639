"""The rows of the sweep that CI runs: one of each kind, the quickest that holds its ops."""

from __future__ import annotations

SAMPLE = (
    "modules/BatchNorm2d/train",
    "modules/Conv2d/train",
    "modules/GroupNorm/train",
    "modules/AdaptiveAvgPool2d/train",
    "modules/GRU/train",
    "optimisers/Adam-for_loop-0/float_lr",
    "optimisers/SGD-foreach-1/float_lr",
    "practices/accumulated_gradients/static",
    "practices/halves_of_kept/dynamic",
    "practices/jacobians/static",
    "practices/assigned_data/static",
    "practices/exported_program/dynamic",
    "refusals/probability/static",
    "refusals/scatter/dynamic",
    "einops/x_transformers.rotary/train",
    "packages/vector_quantize_pytorch.residual/train",
    "timm/test_resnet/train_channels_last",
    "timm/test_vit/train",
    "torchvision/squeezenet1_1/train_channels_last",
    "diffusers/AutoencoderTiny/train",
    "transformers/bert/eval",
)
