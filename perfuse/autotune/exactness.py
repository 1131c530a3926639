"""How exact a result is: references in a wider type, and the gate that challengers have to pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from perfuse.autotune.program_request import known_sizes
from perfuse.autotune.race import Gate
from perfuse.autotune.run_alone import loaded, plan_of_one
from perfuse.context import Context
from perfuse.ir.dtype import DType, to_torch
from perfuse.ir.program import Matmul, Program, View
from perfuse.schedule.plan import Kernel, Plan
from perfuse.schedule.schedule import place
from perfuse.schedule.size_hints import value_of

# A challenger's error may be this many times the default's: one library sums long rows in a chain.
MOST_ERROR = 2.0
# A challenger's largest error in units of the default's: single elements scatter more than means.
MOST_LARGEST_ERROR = 4.0
_ROWS_AT_ONCE = 2048  # of a reference, which is computed in a wider type
# Their products are exact in float32.
_NARROW = (torch.float16, torch.bfloat16, *map(to_torch, (d for d in DType if d.is_float8)))

Results = Sequence[Tensor | None]


def reference_of(
    matmuls: Sequence[Matmul],
    epilogue: Kernel | None,
    alone: Plan,
    inputs: Mapping[str, Tensor],
    context: Context,
) -> Results | None:
    """The results of a plan of matmuls and a kernel that reads them, from exact products.

    None for those that it does not know, and for all where memory is short.
    """
    try:
        known = {**inputs, **{m.out: _exact(m, inputs, alone.program) for m in matmuls}}
        if epilogue is not None:
            one = place(plan_of_one(epilogue, alone), context)
            results = loaded(one, context)([known[name] for name in one.program.inputs])
            known |= {view.buffer: r for view, r in zip(_outputs(one), results, strict=True)}
    except torch.OutOfMemoryError:
        return None
    return [known.get(view.buffer) for view in _outputs(alone)]


def _outputs(plan: Plan) -> Sequence[View]:
    return [view for view in plan.program.outputs if isinstance(view, View)]  # all of them are


def _exact(matmul: Matmul, given: Mapping[str, Tensor], program: Program) -> Tensor:
    """A matmul's result from a wider type, rounded once at the end."""
    buffer = program.buffers[matmul.out]
    a, b, bias = (
        None if view is None else _seen(given[view.buffer], view, program)
        for view in (matmul.operands.a, matmul.operands.b, matmul.operands.bias)
    )
    assert a is not None and b is not None
    # A GPU multiplies float32 many times faster.
    wide = torch.float32 if a.dtype in _NARROW and a.is_cuda else torch.float64
    right = b.to(wide)
    shape, strides = (known_sizes(dims, program) for dims in (buffer.shape, buffer.strides))
    out = torch.empty_strided(shape, strides, dtype=to_torch(buffer.dtype), device=a.device)
    added = None if bias is None or matmul.beta == 0 else bias.to(wide).broadcast_to(shape)
    scales = [_seen(given[view.buffer], view, program) for view in matmul.operands.scales]
    factors = [scale.to(wide).broadcast_to(shape) for scale in scales]
    for first in range(0, a.shape[-2], _ROWS_AT_ONCE):
        rows = (..., slice(first, first + _ROWS_AT_ONCE), slice(None))
        with _exact_products():
            made = (a[rows].to(wide) @ right) * matmul.alpha
        for factor in factors:
            made *= factor[rows]
        out[rows] = (made if added is None else made + added[rows] * matmul.beta).to(out.dtype)
    return out


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _seen(tensor: Tensor, view: View, program: Program) -> Tensor:
    shape, strides = (known_sizes(dims, program) for dims in (view.shape, view.strides))
    return tensor.as_strided(shape, strides, value_of(view.offset, program.hints))


def reference_gate(reference: Results | None) -> Gate:
    """Challengers have to be about as close to the reference as the default. NaN never passes.

    The default stands in for results that the reference does not know.
    """

    def refusal(default: Sequence[Tensor], challenger: Sequence[Tensor]) -> str | None:
        wanted = [None] * len(default) if reference is None else reference
        for number, (exact, old, new) in enumerate(zip(wanted, default, challenger, strict=True)):
            if exact is None:
                exact = old
            allowed, found = _errors(old, exact), _errors(new, exact)
            spacing = _largest(exact) * _epsilon(exact)
            limits = (
                MOST_ERROR * allowed[0] + spacing / 8,
                MOST_LARGEST_ERROR * allowed[1] + spacing,
            )
            if not all(f <= limit for f, limit in zip(found, limits, strict=True)):
                return f"result {number}: error {found[0]:.2e}, the default's {allowed[0]:.2e}"
        return None

    return refusal


def error_gate(exact: Tensor | None) -> Gate:
    """Challengers have to agree with the default, and to be about as exact. NaN never passes.

    `exact`: the first rows and columns of the result in a wider type, if they are known.
    """

    def refusal(default: Tensor, challenger: Tensor) -> str | None:
        scale = float(default.abs().max()) or 1.0
        if not float((challenger - default).abs().max()) <= 1e-4 * scale:
            return "its result differs"
        if exact is None:
            return None
        corner = tuple(map(slice, exact.shape))
        errors = [float((r[corner] - exact).square().mean().sqrt()) for r in (default, challenger)]
        if not errors[1] <= MOST_ERROR * errors[0]:
            return f"its error is {errors[1] / errors[0]:.1f} times the default's"
        return None

    return refusal


def _largest(tensor: Tensor) -> float:
    if not tensor.numel() or tensor.dtype is torch.bool:
        return 0.0
    is_narrow = tensor.dtype in _NARROW  # those of eight bits have no arithmetic of their own
    return float((tensor.float() if is_narrow else tensor).abs().max())


def _epsilon(tensor: Tensor) -> float:
    return float(torch.finfo(tensor.dtype).eps) if tensor.dtype.is_floating_point else 0.0


def _errors(result: Tensor, exact: Tensor) -> tuple[float, float]:
    """The root mean square of the differences, and the largest one."""
    if not result.numel():
        return 0.0, 0.0
    wide = torch.float64 if exact.dtype in (torch.float64, torch.int64) else torch.float32
    apart = (result.to(wide) - exact.to(wide)).abs()
    return float(apart.square().mean().sqrt()), float(apart.max())
