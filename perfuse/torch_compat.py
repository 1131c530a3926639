"""The only file that touches private PyTorch APIs: PyTorch 2.11 to 2.15 is its problem alone."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import EntryPoint
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch._functorch._aot_autograd import descriptors as _descriptors
from torch._ops import OpOverload as OpOverload
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental._backward_state import BackwardState
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils._python_dispatch import _disable_current_modes


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


def is_view_op(target: Any) -> bool:
    """Whether a call returns a window on its first argument's memory."""
    return isinstance(target, OpOverload) and bool(target.is_view)


def source_line(node: Any) -> str:
    """The user's line an FX node comes from, as file:line, or ""."""
    trace = node.meta.get("stack_trace") or ""
    for line in reversed(trace.splitlines()):
        line = line.strip()
        if line.startswith("File "):
            parts = line.split('"')
            number = line.rsplit("line ", 1)[-1].split(",")[0]
            return f"{parts[1]}:{number}" if len(parts) > 1 else ""
    return ""


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


def saved_output_description(index: int, is_unchecked: bool) -> Any:
    """AOTAutograd's name for the `index`-th value a forward saves, None where it keeps none."""
    name = "SavedForBackwardsNoVcCheckAOTOutput" if is_unchecked else "SavedForBackwardsAOTOutput"
    kind = getattr(_descriptors, name, None)
    return None if kind is None else kind(index)


def size_hint(size: Any) -> int:
    """A likely value of a size, without adding a guard: the one seen while tracing."""
    if isinstance(size, int):
        return size
    hint = size.node.hint if size.node.has_hint() else None
    return 4096 if hint is None else int(hint)


def is_backward_state(node: Any) -> bool:
    """A placeholder that carries compiled autograd's hooks instead of a tensor."""
    return isinstance(node.meta.get("val"), BackwardState)


def mutated_descriptions(descriptions: Sequence[Any]) -> list[Any]:
    """AOTAutograd's names of the inputs whose new value is one of the described results."""
    kind = _descriptors.InputMutationAOTOutput
    return [item.mutated_input for item in descriptions if isinstance(item, kind)]


def module_of(root: Any, graph: Graph) -> GraphModule:
    """A module that runs `graph`, whose Python code is only written when somebody calls it."""
    return _LazyGraphModule(root, graph)


def fp8_cast_saturates() -> bool:
    """PyTorch 2.12 made casts to float8_e4m3fn saturate; before, they overflowed to NaN."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return (major, minor) >= (2, 12)


def aot_compile_graph(
    module: Any,
    example_inputs: Sequence[Any],
    *,
    compiler: Callable[..., Any],
    decompositions: Any,
    partition: Callable[..., Any],
) -> Callable[..., Any]:
    """AOTAutograd over a Dynamo graph; `compiler` gets functional ATen graphs, boxed calls."""
    from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func

    def boxed(graph: Any, inputs: Sequence[Any]) -> Any:
        call = compiler(graph, inputs)
        call._boxed_call = True
        return call

    del make_boxed_func
    compiled: Callable[..., Any] = aot_module_simplified(
        module,
        example_inputs,
        fw_compiler=boxed,
        bw_compiler=boxed,
        inference_compiler=boxed,
        decompositions=decompositions,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    return compiled


def add_dynamo_backend(entry_point: EntryPoint) -> None:
    """Put a backend into Dynamo's table of those that are imported on first use."""
    from torch._dynamo.backends import registry

    registry._BACKENDS.setdefault(entry_point.name, entry_point)


def reset_dynamo() -> None:
    """Forget every compiled function, so that the next call compiles again."""
    import torch._dynamo

    torch._dynamo.reset()


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a CPU tensor, row by row."""
    with disable_dispatch_modes():
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        return bytes(flat.numpy())


def symbol_facts(values: Iterable[Any]) -> list[str]:
    """What is known of each size symbol in these values: its range, and the size first seen."""
    found: dict[str, str] = {}
    for value in _sym_leaves(values):
        env = value.node.shape_env
        for symbol in value.node.expr.free_symbols:
            hint = env.backed_var_to_val.get(symbol, "?")
            found[str(symbol)] = f"{symbol} in {env.var_to_range.get(symbol)} seen {hint}"
    return [found[name] for name in sorted(found)]


def _sym_leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            yield value
        elif isinstance(value, tuple | list):
            yield from _sym_leaves(value)
        elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
            yield from _sym_leaves((*value.shape, *value.stride(), value.storage_offset()))


def num_guards(values: Iterable[Any]) -> int:
    """How many guards the sizes in these values stand under."""
    for value in _sym_leaves(values):
        return len(value.node.shape_env.guards)
    return 0


def tensor_of_bytes(
    memory: bytearray, dtype: torch.dtype, shape: Sequence[int], offset: int
) -> torch.Tensor:
    """A tensor over `memory`, real even while a fake mode is active around the call."""
    with disable_dispatch_modes():
        count = math.prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(tuple(shape))


def disabled_autocast() -> AbstractContextManager[Any]:
    """A block in which ATen calls run in the dtypes they are given, whatever autocast says."""
    context: AbstractContextManager[Any] = torch._C._DisableAutocast()
    return context
