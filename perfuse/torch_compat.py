"""The only file that touches private PyTorch APIs: PyTorch 2.11 to 2.15 is its problem alone."""

import ctypes
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import free_symbols, guard_or_false
from torch.fx.node import has_side_effect
from torch.utils import flop_counter as _flop_counter
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack


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
    plain = [op for op in ops if not op._schema.is_mutable and _takes_tensor(op)]
    is_random = any(torch.Tag.nondeterministic_seeded in op.tags for op in ops)
    return bool(plain) and not is_random and all(torch.Tag.pointwise in op.tags for op in plain)


def _takes_tensor(op: OpOverload) -> bool:
    """Not one of the overloads for Python numbers, which are TorchScript's."""
    return any(str(argument.type) == "Tensor" for argument in op._schema.arguments)


def is_view_op(target: Any) -> bool:
    """Whether a call returns a window on its first argument's memory."""
    return isinstance(target, OpOverload) and bool(target.is_view)


def source_line(node: Any) -> str:
    """The user's line an FX node comes from, as file:line, or "".

    The innermost frame that is not PyTorch's own: a user asks where, not which file of PyTorch.
    """
    frames = []
    for line in (node.meta.get("stack_trace") or "").splitlines():
        line = line.strip()
        parts = line.split('"')
        if line.startswith("File ") and len(parts) > 1:
            number = line.rsplit("line ", 1)[-1].split(",")[0]
            frames.append(f"{parts[1]}:{number}")
    own = [frame for frame in frames if not frame.startswith(_TORCH_FOLDER)]
    return (own or frames or [""])[-1]


_TORCH_FOLDER = f"{Path(torch.__file__).parent}/"


def disable_dispatch_modes() -> AbstractContextManager[Any]:
    """A block in which tensors are real even while a fake or tracing mode is active around it."""
    context: AbstractContextManager[Any] = _disable_current_modes()
    return context


def sym_expression(value: Any) -> Any:
    """The expression behind a SymInt, SymFloat or SymBool, to compare without adding a guard."""
    return value.node.expr


def free_symbols_of(value: Any) -> set[Any]:
    """The size symbols that a fake tensor's shape and strides, or a SymInt, speak of."""
    return set(free_symbols(value))


def size_hint(size: Any) -> int:
    """A likely value of a size, without adding a guard: the one seen while tracing."""
    if isinstance(size, int):
        return size
    hint = size.node.hint if size.node.has_hint() else None
    return 4096 if hint is None else int(hint)


def flop_formula(op: OpOverload) -> Callable[..., Any] | None:
    """PyTorch's count of an op's operations, from shapes in place of tensors; None without one."""
    formulas: Any = _flop_counter.flop_registry
    # PyTorch counts attention on GPUs alone; the CPU's has the same arguments in the same order.
    packet = _SAME_FLOPS.get(op.overloadpacket, op.overloadpacket)
    formula: Callable[..., Any] | None = formulas.get(packet)
    return formula


_SAME_FLOPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        torch.ops.aten._scaled_dot_product_flash_attention
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}


def has_fast_products(dtype: torch.dtype) -> bool:
    """Whether the CPU's library multiplies this half type by the processor's own instructions."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    query = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return query is not None and bool(query())


def module_of(root: Any, graph: Graph) -> GraphModule:
    """A module that runs `graph`, whose Python code is only written when somebody calls it."""
    return _LazyGraphModule(root, graph)


def fp8_cast_saturates() -> bool:
    """PyTorch 2.13 made casts to float8_e4m3fn saturate; before, they overflowed to NaN."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return (major, minor) >= (2, 13)


def ambient_state() -> tuple[Any, ...]:
    """The global switches under which a graph is traced."""
    devices = [name for name in ("cpu", "cuda") if torch.amp.is_autocast_available(name)]
    autocast = [
        (name, torch.is_autocast_enabled(name), str(torch.get_autocast_dtype(name)))
        for name in devices
    ]
    from torch._functorch import config as functorch_config
    from torch.fx.experimental import _config as fx_config

    backends: Any = torch.backends
    cudnn, mkldnn, cuda, einsum = (
        backends.cudnn, backends.mkldnn, backends.cuda, backends.opt_einsum
    )  # fmt: skip
    attention = (
        cuda.flash_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple(autocast),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        getattr(torch.utils.deterministic, "fill_uninitialized_memory", None),
        str(torch.get_default_dtype()),
        str(torch.get_default_device()),
        torch.get_float32_matmul_precision(),
        attention,
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, mkldnn.enabled),
        (einsum.enabled, einsum.strategy) if einsum.is_available() else None,
        _flushes_denormals(),
        [config.get_hash().hex() for config in (functorch_config, fx_config)],
    )


def numeric_state() -> str:
    """The global switches that compiling an ATen graph reads: dtypes it fills in, and how constants
    are folded."""
    return f"default dtype {torch.get_default_dtype()} flushes {_flushes_denormals()}"


def _flushes_denormals() -> bool:
    """Whether this thread's arithmetic, and with it folded constants, loses denormal numbers."""
    return sys.float_info.min / 2 == 0.0


def is_autocast_enabled() -> bool:
    """Whether autocast is on for any kind of device."""
    return bool(torch._C._is_any_autocast_enabled())


def has_tracing_hooks() -> bool:
    """Whether something around this call would change what a trace sees or saves."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    modes = [mode for mode in _get_current_dispatch_mode_stack() if not _is_fake(mode)]
    return hooks is not None or bool(modes)


def _is_fake(mode: Any) -> bool:
    return type(mode).__name__ == "FakeTensorMode"


def storage_id(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory."""
    return int(tensor.untyped_storage()._cdata)


def add_dynamo_backend(entry_point: EntryPoint) -> None:
    """Put a backend into Dynamo's table of those that are imported on first use."""
    from torch._dynamo.backends import registry

    registry._BACKENDS.setdefault(entry_point.name, entry_point)


def reset_dynamo() -> None:
    """Forget every compiled function, so that the next call compiles again."""
    import torch._dynamo

    torch._dynamo.reset()


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor, row by row."""
    with disable_dispatch_modes():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return bytes(flat.numpy())


def element_bytes(value: int | float, dtype: torch.dtype) -> bytes:
    """One element of this type, as it is stored in memory."""
    with disable_dispatch_modes():
        return raw_bytes(torch.full((1,), value, dtype=dtype))


UNKNOWN_LEAST = -(2**62)


def symbol_facts(values: Iterable[Any]) -> list[str]:
    """The range and the first size of each size symbol in these values."""
    found: dict[str, str] = {}
    for value in sym_leaves(values):
        env = value.node.shape_env
        for symbol in value.node.expr.free_symbols:
            hint = env.backed_var_to_val.get(symbol, "?")
            found[str(symbol)] = f"{symbol} in {env.var_to_range.get(symbol)} seen {hint}"
    return [found[name] for name in sorted(found)]


def least_values(value: torch.SymInt) -> dict[str, int]:
    """The least that each symbol of a number can be; far below zero where nothing is known."""
    ranges = value.node.shape_env.var_to_range
    found = {}
    for symbol in value.node.expr.free_symbols:
        known = ranges.get(symbol)
        is_known = known is not None and known.lower.is_Integer
        found[str(symbol)] = int(known.lower) if is_known else UNKNOWN_LEAST
    return found


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of such a window may share a place in memory."""
    span = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride < span:
            return True
        span += stride * (size - 1)
    return False


def memory_format_of(x: torch.Tensor) -> torch.memory_format:
    """Channels-last if that is the only layout of `x`, otherwise contiguous."""
    from torch._prims_common import suggest_memory_format

    return suggest_memory_format(x)


def is_known_empty(x: torch.Tensor) -> bool:
    """Whether it is known to be empty while tracing; data-dependent sizes count as not empty."""
    return bool(guard_or_false(x.numel() == 0))


def sym_leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Every symbolic number in these values: sizes and strides of tensors, and numbers."""
    for value in values:
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            yield value
        elif isinstance(value, tuple | list):
            yield from sym_leaves(value)
        elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
            yield from sym_leaves((*value.shape, *value.stride(), value.storage_offset()))


def never_trace(package: str) -> None:
    """Dynamo is not to look into the functions of a package: they run the graphs it made."""
    import torch._dynamo.trace_rules as rules

    rules.add(package)


def keep_checks() -> None:
    """Before PyTorch 2.12, AOTAutograd drops the check that a matrix was not singular."""
    has_side_effect(torch.ops.aten._linalg_check_errors.default)


def tensor_of_bytes(
    memory: bytearray, dtype: torch.dtype, layout: Sequence[Sequence[int]], offset: int, device: str
) -> torch.Tensor:
    """A tensor of this shape and these strides, real even while a fake mode is active around it.

    On the CPU it is in `memory` itself, if its strides allow.
    """
    shape, strides = tuple(layout[0]), tuple(layout[1])
    with disable_dispatch_modes():
        count = math.prod(shape)
        if count == 0:
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
        found = flat.view(shape).to(device)
        if found.stride() == strides:
            return found
        return torch.empty_strided(shape, strides, dtype=dtype, device=device).copy_(found)


def disabled_autocast() -> AbstractContextManager[Any]:
    """A block in which ATen calls run in the dtypes they are given, whatever autocast says."""
    context: AbstractContextManager[Any] = torch._C._DisableAutocast()
    return context


def cpu_allocations(step: Callable[[], Any]) -> list[tuple[int, int]]:
    """When `step()` took (or gave back, less than zero) how many bytes from PyTorch's allocator."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    results: Any = profile.profiler.kineto_results
    memory = (event for event in results.events() if event.name() == "[memory]")
    return [(e.start_ns(), e.nbytes()) for e in memory if e.device_type().name == "CPU"]


def symbol_hints(values: Iterable[Any]) -> dict[str, int]:
    """The size first seen for each size symbol in these values, where it is known."""
    found: dict[str, int] = {}
    for value in sym_leaves(values):
        known = value.node.shape_env.backed_var_to_val
        for symbol in value.node.expr.free_symbols:
            # The length of a nested tensor is a symbol for itself: it has no number.
            if symbol in known and known[symbol].is_Integer:
                found[str(symbol)] = int(known[symbol])
    return found


def tree_leaves(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """The leaves of nested lists, tuples and dictionaries, in order."""
    leaves: list[Any] = torch.utils._pytree.tree_leaves(value, is_leaf)
    return leaves


def tree_map(change: Callable[[Any], Any], value: Any) -> Any:
    """Nested lists, tuples and dictionaries with every leaf changed."""
    return torch.utils._pytree.tree_map(change, value)


def on_compile(start: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Call `start` before and `end` after Dynamo captures and compiles something."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)


@contextmanager
def fake_gpu() -> Iterator[FakeTensorMode]:
    """A block in which tensors are fake, and may be on a GPU that is not there."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _device_guard(), mode:
        yield mode


@contextmanager
def _device_guard() -> Iterator[None]:
    """Lets PyTorch switch to a GPU that it cannot have: it switches to nothing instead.

    Indexing asks for the device's guard even where tensors are fake. A PyTorch that was built for
    GPUs puts an empty one in place itself; one built for CPUs has none, so the CPU's stands in.
    """
    if torch.version.cuda is not None or torch.version.hip is not None:
        yield
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before, guards[1] = guards[1], guards[0]
    try:
        yield
    finally:
        guards[1] = before


def faked_on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor like this one, on a device, under the active fake mode."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    made = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=device)
    made.requires_grad_(tensor.requires_grad)
    return torch.nn.Parameter(made, tensor.requires_grad) if _is_parameter(tensor) else made


def as_if_on(device: torch.device, value: Any) -> Any:
    """A traced tensor, or several, as if traced on this device."""
    if isinstance(value, list | tuple):
        return type(value)(as_if_on(device, item) for item in value)
    if not isinstance(value, FakeTensor):
        return value
    moved: Any = value.detach()
    moved.fake_device = device
    return moved


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def storage_users(storage: Any) -> int:
    """How many tensors and handles hold this memory."""
    private: Any = torch._C
    return int(private._storage_Use_Count(storage._cdata))


def storage_use_counter() -> Callable[[int], int]:
    """A function: the handle of a storage (`_cdata`) -> how many tensors and handles hold it."""
    private: Any = torch._C
    counter: Callable[[int], int] = private._storage_Use_Count
    return counter


def raw_stream_getter() -> Callable[[int], int]:
    """A function: the number of a GPU -> the handle of the stream that work is now put on."""
    private: Any = torch._C
    getter: Callable[[int], int] = private._cuda_getCurrentRawStream
    return getter


def current_gpu_getter() -> Callable[[], int]:
    """A function that returns the index of the current GPU."""
    private: Any = torch._C
    getter: Callable[[], int] = private._cuda_getDevice
    return getter


def capture_getter() -> Callable[[], bool]:
    """A function that returns whether the current stream is being recorded as a graph."""
    private: Any = torch._C
    getter: Callable[[], bool] | None = getattr(private, "_cuda_isCurrentStreamCapturing", None)
    return getter or torch.cuda.is_current_stream_capturing


def gpu_allocator() -> Callable[..., torch.Tensor]:
    """A function: shape, strides, dtype -> memory on the current GPU, contents undefined."""
    guards: Any = torch._C._dynamo.guards
    found: Callable[..., torch.Tensor] | None = getattr(guards, "_empty_strided_cuda", None)
    return found or _empty_on_gpu


def _empty_on_gpu(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")
