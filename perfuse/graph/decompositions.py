"""Which ATen ops are decomposed into smaller ones while AOTAutograd traces, and how.

Three lists decide: `OWN` are our formulas, `STANDARD` names those of PyTorch's library that fit,
and whatever is in neither stays one node for lowering. An op that a PyTorch version does not have
is skipped: the table only ever holds what exists.

Kept whole, on purpose:
- mm, addmm, bmm, baddbmm, convolution, and the flash attention ops: one library call each;
- var, var_mean, sum, mean, amax, cumsum: reductions and scans that lowering knows;
- embedding, embedding_dense_backward, index, index_put, gather, scatter: indexed loads and stores;
- _to_copy, view, expand, permute, slice, cat, constant_pad_nd: they only move an index;
- avg_pool, max_pool, im2col, col2im: windows, which as index arithmetic would be many more nodes;
- as_strided_copy, diagonal_copy, unfold_copy: PyTorch's formulas for these hold the storage offset
  that was traced, which nothing guards;
- rand, rand_like, bernoulli, randint: lowered with the program's own seed.
"""

from collections.abc import Callable, Iterator
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

from perfuse.graph import decompose_layouts as layouts
from perfuse.graph import decompose_norms as norms
from perfuse.graph import decompose_pointwise as pointwise
from perfuse.graph import decompose_reductions as reductions
from perfuse.graph import decompose_softmax as softmax
from perfuse.graph.decompose_fft import fft_c2c, fft_c2r, fft_r2c
from perfuse.graph.decompose_foreach import FOREACH
from perfuse.graph.decompose_invalid import INVALID, cropped_as_eager
from perfuse.graph.decompose_scatter import index_fill, into_own_copy
from perfuse.graph.decompose_strides import ELEMENTWISE, strided_as_eager
from perfuse.torch_compat.ops import OpOverload, schema_of, standard_decompositions, takes_tensor

Decomposition = Callable[..., Any]
aten = torch.ops.aten

NORMS = """
native_batch_norm native_batch_norm_backward _native_batch_norm_legit
_native_batch_norm_legit_functional _native_batch_norm_legit_no_training
_batch_norm_with_update_functional batch_norm_backward
cudnn_batch_norm cudnn_batch_norm_backward miopen_batch_norm_backward
_weight_norm_interface renorm
""".split()

ACTIVATIONS = """
celu elu elu_backward glu glu_backward hardshrink hardsigmoid hardsigmoid_backward hardswish
hardswish_backward hardtanh hardtanh_backward leaky_relu leaky_relu_backward
log_sigmoid_backward logit_backward _prelu_kernel _prelu_kernel_backward
relu6 rrelu_with_noise_backward selu sigmoid_backward softshrink
tanh_backward threshold native_dropout native_dropout_backward
""".split()

LOSSES = """
binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits huber_loss
huber_loss_backward mse_loss mse_loss_backward multi_margin_loss nll_loss_forward
nll_loss2d_forward smooth_l1_loss smooth_l1_loss_backward soft_margin_loss
""".split()

ARITHMETIC = """
addcdiv addcmul addr aminmax clamp_max clamp_min count_nonzero deg2rad dist dot
floor_divide frac heaviside isneginf isposinf lerp linalg_cross logaddexp
logaddexp2 logit mv mvlgamma nan_to_num nansum norm rad2deg rsub sgn sinc special_entr
special_log_ndtr special_xlog1py std std_mean trace vdot xlogy
""".split()

CREATION = """
arange.default arange.start empty_like eye fill linspace logspace new_empty new_full new_ones
new_zeros ones ones_like tril_indices triu_indices zero zeros zeros_like
""".split()

MOVEMENT = """
_unsafe_masked_index _unsafe_masked_index_put_accumulate block_diag channel_shuffle
diag_embed diagonal_backward index_add index_copy
isin masked_fill pixel_shuffle pixel_unshuffle
rot90 select_backward slice_backward
split_with_sizes_copy stack t take tril triu unbind unfold_backward unsafe_split
unsafe_split_with_sizes transpose_copy unsqueeze_copy squeeze_copy
expand_copy view_copy alias_copy t_copy permute_copy
""".split()

RESAMPLING = """
affine_grid_generator grid_sampler_2d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
upsample_bicubic2d
""".split()

STANDARD = (*NORMS, *ACTIVATIONS, *LOSSES, *ARITHMETIC, *CREATION, *MOVEMENT, *RESAMPLING)


def convert_element_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """PyTorch's reference formulas cast with a primitive of their own: one spelling for all."""
    return x.to(dtype)


OWN: dict[str, Decomposition] = {
    "aten._softmax.default": softmax.softmax,
    "aten._safe_softmax.default": softmax.safe_softmax,
    "aten._log_softmax.default": softmax.log_softmax,
    "aten._softmax_backward_data.default": softmax.softmax_backward,
    "aten._log_softmax_backward_data.default": softmax.log_softmax_backward,
    "aten.nll_loss_backward.default": softmax.nll_loss_backward,
    "aten.nll_loss2d_backward.default": softmax.nll_loss_backward,
    "aten.native_layer_norm.default": norms.layer_norm,
    "aten.native_layer_norm_backward.default": norms.layer_norm_backward,
    "aten.native_group_norm.default": norms.group_norm,
    "aten.native_group_norm_backward.default": norms.group_norm_backward,
    "aten._fused_rms_norm.default": norms.rms_norm,
    "aten._fused_rms_norm_backward.default": norms.rms_norm_backward,
    "aten.gelu.default": pointwise.gelu,
    "aten.gelu_backward.default": pointwise.gelu_backward,
    "aten.silu.default": pointwise.silu,
    "aten.silu_backward.default": pointwise.silu_backward,
    "aten.mish.default": pointwise.mish,
    "aten.mish_backward.default": pointwise.mish_backward,
    "aten.native_dropout.default": pointwise.native_dropout,
    "aten.softplus.default": pointwise.softplus,
    "aten.softplus_backward.default": pointwise.softplus_backward,
    "aten.threshold_backward.default": pointwise.threshold_backward,
    "aten.log_sigmoid_forward.default": pointwise.log_sigmoid_forward,
    "aten.soft_margin_loss_backward.default": pointwise.soft_margin_loss_backward,
    "aten.lerp.Scalar": pointwise.lerp,
    **{f"aten.reflection_pad{n}d.default": layouts.padded(layouts.reflected) for n in (1, 2, 3)},
    **{f"aten.reflection_pad{n}d_backward.default": layouts.reflected_backward for n in (1, 2, 3)},
    **{f"aten.replication_pad{n}d.default": layouts.padded(layouts.replicated) for n in (1, 2, 3)},
    "aten.constant_pad_nd.default": cropped_as_eager,
    "aten.roll.default": layouts.roll,
    "aten.narrow_copy.default": layouts.narrow_copy,
    "aten.split.Tensor": layouts.split,
    "aten.split_with_sizes.default": layouts.split_with_sizes,
    "aten.logsumexp.default": reductions.logsumexp,
    "aten.linalg_vector_norm.default": reductions.vector_norm,
    "aten._fft_c2c.default": fft_c2c,
    "aten._fft_r2c.default": fft_r2c,
    "aten._fft_c2r.default": fft_c2r,
    "aten.index_fill.int_Scalar": index_fill,
    "aten.index_fill.int_Tensor": index_fill,
    "aten.slice_scatter.default": into_own_copy(aten.slice_scatter.default),
    "aten.select_scatter.default": into_own_copy(aten.select_scatter.default),
    "aten.diagonal_scatter.default": into_own_copy(aten.diagonal_scatter.default),
    "prims.convert_element_type.default": convert_element_type,
    **FOREACH,
}


def _find(name: str) -> Any | None:
    """The op `namespace.packet[.overload]`, or None in a PyTorch that has no such op."""
    start: Any = torch.ops
    return reduce(lambda found, part: getattr(found, part, None), name.split("."), start)


def _elementwise_ops() -> Iterator[OpOverload]:
    for packet in filter(None, (_find(f"aten.{name}") for name in ELEMENTWISE)):
        overloads = (getattr(packet, name) for name in packet.overloads())
        yield from (op for op in overloads if _is_functional(op) and takes_tensor(op))


def _is_functional(op: OpOverload) -> bool:
    """Out and in-place variants never reach a table that works below functionalization.

    Batch norm in evaluation does: its schema may write the statistics, but it only reads them.
    """
    return not schema_of(op).is_mutable or str(op) == "aten._native_batch_norm_legit.default"


def _as_eager(op: OpOverload, rule: Decomposition) -> Decomposition:
    """A standard rule, with eager's strides and treatment of invalid values where it has others."""
    name = str(op)
    if name in INVALID:
        return INVALID[name](rule)
    if "backward" in name:
        return rule
    return layouts.first_as_eager(rule) if "batch_norm" in name else rule


def decomposition_table(*, fallback_random: bool = False) -> dict[OpOverload, Decomposition]:
    """A new table for AOTAutograd's `decompositions`: the standard rows, then our own over them.

    With `fallback_random`, random ops stay whole: decomposed, they would draw other numbers than
    eager's kernels.
    """
    table = dict(_full_table())
    if fallback_random:
        table.pop(aten.native_dropout.default, None)
    return table


@cache
def _full_table() -> dict[OpOverload, Decomposition]:
    """Built once: it looks up the schemas of a thousand ops."""
    ops = [op for name in STANDARD if (op := _find(f"aten.{name}")) is not None]
    standard = standard_decompositions(ops)
    table = {op: _as_eager(op, rule) for op, rule in standard.items() if _is_functional(op)}
    table |= {op: rule for name, rule in OWN.items() if (op := _find(name)) is not None}
    return table | {op: strided_as_eager(op, table.get(op)) for op in _elementwise_ops()}
