"""Rows of the training kind that make networks, and the table of all groups."""

from __future__ import annotations

from tests.random_programs import tensor_rows as tensors
from tests.random_programs.row import net_rows as _rows

CONV = (
    *_rows(
        "round",
        "F.conv2d({x}, {w[O, C, K, K]}, {w[O]}, stride={S}, padding={P})",
        "F.conv2d({x}, {w[O, C, K, K]}, padding={P}, dilation=2)",
        "F.conv2d({x}, {w[O * G, C // G, K, K]}, {w[O * G]}, padding={P}, groups={G})",
        "F.conv2d({x}, {w[C, 1, 3, 3]}, {w[C]}, padding=1, groups={C})",
        "F.conv2d({x}, {w[O, C, 1, 1]}, {w[O]})",
        "F.conv_transpose2d({x}, {w[C, O, K, K]}, {w[O]}, stride={S})",
        "F.conv_transpose2d({x}, {w[C, O, 2, 2]}, stride=2, groups=1)",
        "F.conv2d({x}, {w[O, C, K, K]}, {w[O]}, padding={P}).contiguous("
        "memory_format=torch.channels_last)",
        "squeeze_excite({x}, {w[C, 3]}, {w[3, C]})",
        ranks=(4,),
    ),
    *_rows(
        "round",
        "F.conv1d({x}, {w[O, C, K]}, {w[O]}, stride={S}, padding={P})",
        "F.conv1d({x}, {w[O * G, C // G, K]}, groups={G})",
        "F.conv1d({x}, {w[C, 1, 3]}, {w[C]}, padding=1, groups={C})",
        "F.conv_transpose1d({x}, {w[C, O, K]}, stride={S})",
        ranks=(3,),
    ),
)
POOL = (
    *_rows(
        "round",
        "F.avg_pool2d({x}, 2)",
        "F.avg_pool2d({x}, 3, stride={S}, padding=1, count_include_pad={k})",
        "F.adaptive_avg_pool2d({x}, 1)",
        "F.adaptive_avg_pool2d({x}, 1).flatten(1) @ {w[C, O]}",
        "F.adaptive_avg_pool2d({x}.contiguous(memory_format=torch.channels_last), 1)",
        "F.adaptive_avg_pool2d({x}, (2, 3))",
        "{x}.mean((2, 3)) @ {w[C, O]}",
        "{x}.mean((2, 3), keepdim={k})",
        "F.interpolate({x}, scale_factor=2, mode='bilinear', align_corners={k})",
        "F.lp_pool2d({x}.abs() + 1, 2, 2)",
        ranks=(4,),
    ),
    *_rows(
        "kink",
        "F.max_pool2d({x}, 2)",
        "F.max_pool2d({x}, 3, stride={S}, padding=1)",
        "F.adaptive_max_pool2d({x}, 1)",
        "F.adaptive_max_pool2d({x}, (2, 2))",
        "{x}.amax((2, 3))",
        ranks=(4,),
    ),
    *_rows(
        "keep",
        "F.interpolate({x}, scale_factor=2)",
        "F.pixel_shuffle({x}.repeat(1, 4, 1, 1), 2)",
        "F.pad({x}, (1, 1, 1, 1), mode='reflect')",
        "F.pad({x}, (1, 0, 2, 1), mode='circular')",
        "F.unfold({x}, 2)",
        ranks=(4,),
    ),
    *_rows("round", "F.avg_pool1d({x}, 2)", "F.adaptive_avg_pool1d({x}, 1)", ranks=(3,)),
    *_rows("kink", "F.max_pool1d({x}, 2)", "F.adaptive_max_pool1d({x}, 2)", ranks=(3,)),
)
NORM = (
    *_rows(
        "round",
        "F.batch_norm({x}, {b[C]}, {q[C]}, {w[C]}, {w[C]}, training=True)",
        "F.batch_norm({x}, {b[C]}, {q[C]}, {w[C]}, {w[C]}, training=True, momentum=0.3)",
        "F.batch_norm({x}, {b[C]}, {q[C]}, {w[C]}, {w[C]}, training=False)",
        "F.batch_norm({x}, None, None, {w[C]}, {w[C]}, training=True)",
        "F.group_norm({x}, {G}, {w[C]}, {w[C]})",
        "F.group_norm({x}, {G})",
        ranks=(2, 3, 4),
    ),
    *_rows(
        "round",
        "F.instance_norm({x})",
        "F.instance_norm({x}, {b[C]}, {q[C]}, {w[C]}, {w[C]}, use_input_stats=True)",
        "F.local_response_norm({x}, 2)",
        ranks=(3, 4),
    ),
    *_rows(
        "round",
        "F.layer_norm({x}, ({D},), {w[D]}, {w[D]})",
        "F.layer_norm({x}, {x}.shape[-1:])",
        "F.rms_norm({x}, ({D},), {w[D]})",
        "F.layer_norm({x}.permute(0, 2, 3, 1), ({C},), {w[C]}, {w[C]}).permute(0, 3, 1, 2)",
        "F.normalize({x} + 2, dim={d})",
        "torch.softmax({x}, {d})",
        "torch.log_softmax({x}, {d})",
        ranks=(2, 3, 4),
    ),
)
LINEAR = (
    *_rows(
        "round",
        "F.linear({x}, {w[O, D]}, {w[O]})",
        "{x} @ {w[D, O]}",
        "torch.einsum('...d,od->...o', {x}, {w[O, D]})",
        "{x} * torch.sigmoid(F.linear({x}, {w[D, D]}))",
        "F.bilinear({x}, {x}, {w[2, D, D]})",
        ranks=(1, 2, 3, 4),
    ),
    *_rows(
        "round",
        "torch.addmm({w[O]}, {x}, {w[D, O]}, beta=0.5, alpha=2)",
        "torch.cdist({x} + 1, {w[3, D]} * 2)",
        "F.cross_entropy({x}, torch.arange({x}.shape[0], device={x}.device) % {x}.shape[1])",
        "F.pairwise_distance({x}, {x}.flip(0) + 1)",
        "F.cosine_similarity({x} + 2, {x}.flip(0) - 2)",
        ranks=(2,),
    ),
)
ATTENTION = (
    *_rows(
        "round",
        "attention({x}, {w[D, 3 * O * 2]}, 2)",
        "F.scaled_dot_product_attention({x}, {x} * 0.5, {x} + 1)",
        "F.scaled_dot_product_attention({x}, {x}.flip(1), {x}, is_causal=True)",
        "F.scaled_dot_product_attention("
        "{x}.unflatten(-1, (2, -1)).transpose(1, 2), {x}.unflatten(-1, (2, -1)).transpose(1, 2), "
        "{x}.unflatten(-1, (2, -1)).transpose(1, 2)).transpose(1, 2).flatten(2)",
        "{x} + F.embedding(torch.arange({x}.shape[1], device={x}.device), {w[16, D]})",
        "{x} @ {x}.transpose(-1, -2)",
        "torch.baddbmm({x}, {x} @ {x}.transpose(-1, -2), {x}, alpha=0.1)",
        "torch.cumsum({x}, 1) * 0.3",
        ranks=(3,),
    ),
    *_rows(
        "round",
        "F.embedding({x} % 5, {w[5, O]})",
        "F.embedding({x} % 5, {w[5, O]}, padding_idx=0)",
        "F.embedding_bag({x} % 5, {w[5, O]}, mode='sum')",
        "F.one_hot({x} % 4, 4).to(f32) @ {w[4, O]}",
        ranks=(2,),
        operand="int",
    ),
)
LOOP = (
    *_rows("round", "rnn({x}, {w[D, 4]}, {w[4, 4]})", "gru({x}, {w[D, 9]}, {w[3, 9]})", ranks=(3,)),
    *_rows("round", "recurrence({x}, 0.5)", "recurrence({x}, {s})", ranks=(2, 3)),
)
GROUPS = {
    "conv": CONV,
    "pool": POOL,
    "norm": NORM,
    "linear": LINEAR,
    "attention": ATTENTION,
    "loop": LOOP,
    "shape": tensors.SHAPE,
    "scatter": tensors.SCATTER,
    "inplace": tensors.INPLACE,
    "assign": tensors.ASSIGN,
    "complex": tensors.COMPLEX,
    "pointwise": tensors.POINTWISE,
    "reduce": tensors.REDUCE,
    "order": tensors.ORDER,
    "integer": tensors.INTEGER,
    "cast": tensors.CAST,
    "optimiser": tensors.OPTIMISER,
}
