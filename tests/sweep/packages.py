"""The software of others: where it is, and how it is imported beside any build of PyTorch.

`make test` and `make sweep` put it into a folder of its own, `.sweep_deps`, and only the sweep
looks there. In the environment itself a torchvision that was built for another PyTorch would break
the import of transformers.
"""

from __future__ import annotations

import sys

import torch

from tests.harness.devices import ROOT, use_carried_packages

FOLDER = ROOT / ".sweep_deps"


def use_packages() -> None:
    """Make the folder importable; torchvision first, which others import where they find it."""
    use_carried_packages()
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    try:
        import_torchvision()
    except ImportError:
        return  # its rows say so


def import_torchvision() -> None:
    """A build for another PyTorch lacks its C++ ops; models that need none of them run without."""
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"torchvision::{name}", schema)
        import torchvision  # noqa: F401
