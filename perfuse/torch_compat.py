"""The only file that touches private PyTorch APIs: PyTorch 2.11 to 2.15 is its problem alone."""

from collections.abc import Callable, Sequence
from typing import Any

from torch._decomp import get_decompositions
from torch._ops import OpOverload


def standard_decompositions(ops: Sequence[Any]) -> dict[OpOverload, Callable[..., Any]]:
    """PyTorch's own formulas for `ops` (overloads or packets), those without one left out."""
    return dict(get_decompositions(ops))
