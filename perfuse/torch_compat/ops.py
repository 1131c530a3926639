"""Operators: names, schemas, decompositions, flops, and differences between PyTorch versions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.fx.node import has_side_effect
from torch.utils import flop_counter as _flop_counter


def standard_decompositions(ops: Sequence[Any]) -> dict[OpOverload, Callable[..., Any]]:
    """PyTorch's own formulas for `ops` (overloads or packets), those without one left out."""
    found = get_decompositions(ops)
    return {op: rule for op, rule in found.items() if isinstance(op, OpOverload)}


def op_name(target: Any) -> str:
    """A name by which the host finds an op again; "py:..." for what is not in torch.ops."""
    if isinstance(target, OpOverload):
        return str(target)
    name = getattr(target, "__name__", type(target).__name__)
    return f"py:{name}"


def schema_of(target: Any) -> Any:
    """The schema of an operator; None for what has none."""
    return getattr(target, "_schema", None)


def bare_op(op: Any) -> Any:
    """The function behind an operator of torch.ops, without a Python frame in between."""
    return op._op if isinstance(op, OpOverload) else op


def is_effect(target: Any) -> bool:
    """Whether a call wraps another that must happen in order: `with_effects(token, op, ...)`."""
    return getattr(target, "__name__", "") == "with_effects"


def is_pointwise_function(target: Any) -> bool:
    """Whether a call is of torch's own `torch.cos` and the like: element by element, no effects."""
    name = getattr(target, "__name__", "")
    if getattr(torch, name, None) is not target and getattr(torch._C._nn, name, None) is not target:
        return False
    packet = getattr(torch.ops.aten, name, None)
    ops = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    plain = [op for op in ops if not schema_of(op).is_mutable and takes_tensor(op)]
    is_random = any(torch.Tag.nondeterministic_seeded in op.tags for op in ops)
    return bool(plain) and not is_random and all(torch.Tag.pointwise in op.tags for op in plain)


def takes_tensor(op: OpOverload) -> bool:
    """Not one of the overloads for Python numbers, which are TorchScript's."""
    return any(str(argument.type) == "Tensor" for argument in schema_of(op).arguments)


def is_view_op(target: Any) -> bool:
    """Whether a call returns a window on its first argument's memory."""
    return isinstance(target, OpOverload) and bool(target.is_view)


def flop_formula(op: OpOverload) -> Callable[..., Any] | None:
    """PyTorch's count of an op's operations, from shapes in place of tensors; None without one."""
    formulas: Any = _flop_counter.flop_registry
    # PyTorch counts attention on GPUs alone; the CPU's has the same arguments in the same order.
    packet = _SAME_FLOPS.get(op.overloadpacket, op.overloadpacket)
    formula: Callable[..., Any] | None = formulas.get(packet)
    first = _ATTENTION_OPERANDS.get(packet)
    return formula if formula is None or first is None else partial(_with_all_heads, formula, first)


_FLASH = "_scaled_dot_product_flash_attention"
_SAME_FLOPS = {
    getattr(torch.ops.aten, f"{_FLASH}_for_cpu{half}"): getattr(torch.ops.aten, f"{_FLASH}{half}")
    for half in ("", "_backward")
}
_ATTENTION_OPERANDS = {  # where the query is among the arguments; keys and values are next
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention{half}"): int(bool(half))
    for kind in ("flash", "efficient", "cudnn")
    for half in ("", "_backward")
}


def _with_all_heads(formula: Callable[..., Any], first: int, *args: Any, **options: Any) -> Any:
    """PyTorch 2.11 does not count attention in which several heads of the query share a key's."""
    num_heads = args[first][1]
    shared = [torch.Size((x[0], num_heads, *x[2:])) for x in args[first + 1 : first + 3]]
    return formula(*args[: first + 1], *shared, *args[first + 3 :], **options)


def has_fast_matmuls(dtype: torch.dtype) -> bool:
    """Whether the CPU's library multiplies this half type by the processor's own instructions."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    query = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return query is not None and bool(query())


@dataclass(frozen=True, slots=True)
class PackedConvolution:
    """The ops of the CPU's library for convolutions with a weight in its own layout."""

    reorder: OpOverload  # the weight into that layout
    pointwise: OpOverload


@cache
def packed_convolution_ops() -> PackedConvolution | None:
    """These ops, if this build of PyTorch has them."""
    ops = torch.ops.mkldnn
    names = ("_reorder_convolution_weight", "_convolution_pointwise")
    is_available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not is_available or not all(hasattr(ops, name) for name in names):
        return None
    reorder, pointwise = (getattr(ops, name).default for name in names)
    return PackedConvolution(reorder, pointwise)


def has_matrix_units() -> bool:
    """Whether the CPU has units that multiply half-precision matrices (AMX)."""
    query = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return query is not None and bool(query())


def fp8_cast_saturates() -> bool:
    """PyTorch 2.13 made casts to float8_e4m3fn saturate; before, they overflowed to NaN."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return (major, minor) >= (2, 13)


def keep_checks() -> None:
    """Before PyTorch 2.12, AOTAutograd drops the check that a matrix was not singular."""
    has_side_effect(torch.ops.aten._linalg_check_errors.default)


def recurrent_layer(*args: Any) -> Any:
    """`aten.mkldnn_rnn_layer`, which keeps what its backward needs only where gradients are on."""
    with torch.set_grad_enabled(args[-1]), torch._C._AutoDispatchBelowAutograd():
        return torch.ops.aten.mkldnn_rnn_layer.default(*args)


def recurrent_layer_backward(*args: Any) -> Any:
    """`aten.mkldnn_rnn_layer_backward`, with gradients of the types that they were traced with.

    They are float32, but PyTorch 2.11 traces them with the types of the operands.
    """
    results = torch.ops.aten.mkldnn_rnn_layer_backward.default(*args)
    dtype = args[0].dtype
    if dtype is torch.float32 or _knows_recurrent_gradients():
        return results
    return tuple(result.to(dtype) for result in results)


@cache
def _knows_recurrent_gradients() -> bool:
    """Whether gradients of a recurrent layer in half precision are traced as float32."""
    x = torch.empty(1, 1, 1, dtype=torch.bfloat16, device="meta")
    matrix, vector = x[0].expand(4, 1), x[0, 0].expand(4)
    operands = (x, matrix, matrix, vector, vector, x[0], x[0], x, x[0], x[0], x, None, None)
    options: tuple[Any, ...] = (False, 2, 1, 1, True, True, False, [], False, x)  # 2: an LSTM
    first = torch.ops.aten.mkldnn_rnn_layer_backward.default(*operands, *options)[0]
    return bool(first.dtype is torch.float32)
