"""Programs that once came out wrong, or not at all: the seeds of mutations.

A row is (inputs, statements, outputs) as text. Sizes are `a`, `b`, `c` and floats are `f32`, so
that mutations can change both.
"""

from __future__ import annotations

Row = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]


def randn(*dims: str) -> str:
    return f"torch.randn(({', '.join(dims)},), generator=g).to(f32)"


def indices(bound: str, *dims: str) -> str:
    return f"torch.randint(0, {bound}, ({', '.join(dims)},), generator=g)"


IMAGE, TABLE, CUBE = randn("a", "4", "b", "c"), randn("b", "c"), randn("a", "b", "c")
SQUARE, LINE = randn("b", "b"), randn("4 * b")

CORPUS: dict[str, Row] = {
    "pool_to_one": (
        (IMAGE, randn("4", "5")),
        (
            "t0 = x0.contiguous(memory_format=torch.channels_last)",
            "t1 = F.adaptive_avg_pool2d(t0, 1).flatten(1) @ x1",
        ),
        ("t1",),
    ),
    "mean_of_channels_last": (
        (IMAGE, randn("4", "5")),
        ("t0 = x0.permute(0, 2, 3, 1).mean((1, 2)) @ x1",),
        ("t0",),
    ),
    "as_strided_scatter": (
        (randn("2", "b"), randn("b", "8")),
        ("t0 = x0 @ x1", "t1 = torch.as_strided_scatter(t0.new_zeros(20), t0, (2, 8), (8, 1), 0)"),
        ("t1",),
    ),
    "sum_with_flip": ((randn("4", "4"),), ("t0 = (x0 + x0.flip(0)).sum(-1)",), ("t0",)),
    "distance_to_flip": (
        (randn("b", "8"),),
        ("t0 = F.pairwise_distance(x0 + 1, x0.flip(0) - 1)",),
        ("t0",),
    ),
    "maximum_of_computed": (
        (TABLE, TABLE),
        ("t0 = torch.sigmoid(x0 * 1.7 + x1) * x0", "t1 = t0.amax(-1)", "t2 = t0.amin(0)"),
        ("t1", "t2"),
    ),
    "filled_transposed": (
        (randn("c", "b"), indices("c", "2")),
        ("t0 = torch.index_fill(x0.t(), 1, x1, 2)",),
        ("t0",),
    ),
    "step_with_scalar": (
        (TABLE, TABLE, "0.1 / (k + 1)"),
        ("t0 = (x0 * (1 - 0.1 * s2)).add(x1, alpha=-s2)",),
        ("t0",),
    ),
    "scatters_in_a_row": (
        (TABLE, indices("b", "b"), indices("b", "b"), randn("b", "c")),
        (
            "t0 = torch.index_add(x0, 0, x1, x3)",
            "t1 = torch.index_add(t0, 0, x2, x3 * 2)",
            "t2 = torch.index_add(t1, 0, x1, x3 * 0.5)",
        ),
        ("t2",),
    ),
    "relational_convolution": (
        (TABLE, indices("b", "6"), indices("b", "6"), randn("3", "c", "4")),
        (
            "t0 = x0.new_zeros(x0.shape[0], 4)",
            "t1 = t0.index_add(0, x1, (x0 @ x3[0])[x2])",
            "t2 = t1.index_add(0, x2, (x0 @ x3[1])[x1])",
            "t3 = t2.index_add(0, x1, (x0 @ x3[2])[x1])",
        ),
        ("t3",),
    ),
    "inverse_stft": (
        (randn("a", "4 * c"),),
        (
            "t0 = torch.stft(x0, 4, 2, return_complex=True, window=torch.ones(4))",
            "t1 = torch.istft(t0, 4, 2, window=torch.ones(4))",
        ),
        ("t1",),
    ),
    "overwritten_recomputed": (
        (CUBE,),
        ("t0 = x0.to(f32) * 0.5", "x0[::2].add_(1)", "t1 = F.rms_norm(t0, t0.shape[-1:])"),
        ("t1",),
    ),
    "overwritten_between": (
        (TABLE,),
        ("t0 = x0 * 2 + 1", "x0.mul_(3)", "t1 = t0.sum(-1)", "t2 = t0.exp()"),
        ("t1", "t2"),
    ),
    "regrouped_norm": (
        (CUBE,),
        ("t0 = torch.linalg.vector_norm(x0.reshape(-1, x0.shape[1]) + 3, dim=-2, keepdim=True)",),
        ("t0",),
    ),
    "sizes_as_values": (
        (TABLE,),
        (
            "t0 = F.pad(x0, (-1, 1)) <= 1",
            "t1 = torch.index_put(t0, (torch.arange(t0.shape[0]).flip(0)[:2],), "
            "t0.new_full((), 1))",
        ),
        ("t1",),
    ),
    "vertical_masked": (
        (CUBE,),
        ("x0[..., :1].mul_(2)", "t0 = x0.var(dim=-2, correction=0, keepdim=True)"),
        ("t0",),
    ),
    "repeated_scatters": (
        (SQUARE,),
        (
            "t0 = x0.unsqueeze(0).expand(4, *x0.shape)",
            "t1 = torch.slice_scatter(t0, torch.ones_like(t0[1:]), 0, 1).sin()",
            "t2 = torch.select_scatter(t0, x0 + 1, 0, 2)",
            "t3 = torch.diagonal_scatter(t0, t0.diagonal() * 2)",
        ),
        ("t1", "t2", "t3"),
    ),
    "saved_transposed": (
        (SQUARE,),
        (
            "t0 = torch.scatter_reduce(x0, -2, torch.zeros_like(x0, dtype=i64), x0, 'amax')",
            "t1 = torch.sort(torch.cumsum(x0, 0)[1:-1, 1::2].transpose(0, 1), 0)[0]",
        ),
        ("t0", "t1"),
    ),
    "silu_of_rows": ((CUBE,), ("t0 = F.silu(x0[::2])",), ("t0",)),
    "window_rolled": ((CUBE,), ("t0 = x0.unfold(0, 1, 1).roll(1, 1)",), ("t0",)),
    "half_alias": (
        (TABLE,),
        ("t0 = x0[..., 1:].squeeze()", "t1 = t0.narrow(0, 0, t0.shape[0] // 2)"),
        ("t1",),
    ),
    "quotient_saved": (
        (TABLE,),
        ("t0 = x0.narrow(0, 0, x0.shape[0] // 2)", "t1 = F.avg_pool1d(t0, 2).exp()"),
        ("t1",),
    ),
    "quotient_stride": (
        (randn("a", "3", "4 * b"), randn("5", "3", "6")),
        ("t0 = F.conv1d(x0, x1, stride=4)", "t1 = t0[..., 1:]"),
        ("t0", "t1"),
    ),
    "parts_of_a_temporary": (
        (randn("12", "6"), randn("6", "4"), "3 + k"),
        ("t0 = x0.sin() + 1", "t1 = torch.cat([t0[:s2] @ x1, t0[s2:] @ x1])"),
        ("t1",),
    ),
    "labels_across_lanes": (
        (randn("b", "5"), indices("5", "b", "5")),
        ("t0 = F.multilabel_margin_loss(x0, x1)",),
        ("t0",),
    ),
    "window_before_offset": (
        (LINE,),
        ("t0 = x0[5:]", "t1 = t0.as_strided((2, 2), (1, 2), 0)", "t2 = t1 * 2"),
        ("t2",),
    ),
    "long_recurrence": ((randn("a", "6", "c"),), ("t0 = recurrence(x0, 0.5)",), ("t0",)),
    "norm_of_one": (
        (randn("1", "c"),),
        ("t0 = torch.linalg.vector_norm(x0 + 3, dim=-2)",),
        ("t0",),
    ),
    "constant_expanded": ((TABLE,), ("t0 = x0 + torch.tensor(0.5).expand(1)",), ("t0",)),
    "product_with_its_flip": (
        (SQUARE, SQUARE),
        ("t0 = x0 @ x1", "t1 = t0 * 0.1 + t0.flip(0)", "t2 = t1 @ x1"),
        ("t2",),
    ),
    "real_of_a_spectrum": (
        (TABLE,),
        ("t0 = torch.sigmoid(x0)", "t1 = torch.fft.fft(t0).real", "t2 = torch.fft.fft(x0).imag"),
        ("t1", "t2"),
    ),
    "alias_and_result": ((TABLE,), ("t0 = x0.sin()", "t1 = x0.narrow(0, 1, 2)"), ("t0", "t1")),
}
