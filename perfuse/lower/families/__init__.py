"""The op families: operands and attributes of one ATen op -> its formula, loop or library call.

Importing this package fills the registry of lowerings. A lowering changes nothing but its builder.
"""

# ruff: noqa: F401 (imported for what they register)

from perfuse.lower.families import (
    attention,
    average_pooling,
    chunks,
    creation,
    depthwise,
    division,
    dot_product_attention,
    grouped_matmul,
    indexing,
    matmul,
    misc,
    pointwise,
    pooling,
    random,
    reductions,
    scattering,
    storage,
    top_k,
    upsample,
    views,
)
