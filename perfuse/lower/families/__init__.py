"""The op families. Importing this package fills the registry of lowerings."""

from perfuse.lower.families import (
    creation,
    pointwise,
    products,
    reductions,
    views,
)

__all__ = ["creation", "pointwise", "products", "reductions", "views"]
