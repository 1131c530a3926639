"""The op families. Importing this package fills the registry of lowerings."""

from perfuse.lower.families import (
    average_pooling,
    creation,
    division,
    indexing,
    matmul,
    misc,
    pointwise,
    pooling,
    random,
    reductions,
    scans,
    scattering,
    storage,
    upsample,
    views,
)

__all__ = [
    "average_pooling",
    "creation",
    "division",
    "indexing",
    "matmul",
    "misc",
    "pointwise",
    "pooling",
    "random",
    "reductions",
    "scans",
    "scattering",
    "storage",
    "upsample",
    "views",
]
