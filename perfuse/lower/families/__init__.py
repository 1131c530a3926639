"""The op families. Importing this package fills the registry of lowerings."""

from perfuse.lower.families import (
    creation,
    indexing,
    pointwise,
    products,
    random,
    reductions,
    scans,
    scattering,
    views,
)

__all__ = [
    "creation",
    "indexing",
    "pointwise",
    "products",
    "random",
    "reductions",
    "scans",
    "scattering",
    "views",
]
