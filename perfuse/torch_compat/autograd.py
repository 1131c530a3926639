"""AOTAutograd and autograd functions: how graphs are traced with their backward, and run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp.decompositions import upsample_compute_output_size
from torch._functorch._aot_autograd import descriptors as _descriptors
from torch._guards import TracingContext
from torch.fx.experimental._backward_state import BackwardState

from perfuse.torch_compat.graphs import GraphKind
from perfuse.torch_compat.sizes import has_hint, is_known_empty, size_hint
from perfuse.torch_compat.state import (
    disable_dispatch_modes,
    disabled_autocast,
    is_autocast_enabled,
)
from perfuse.torch_compat.tensors import as_stored, overlap_in_order, overlaps

_RESAMPLING = """
upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_bilinear2d upsample_bicubic2d
""".split()


def aot_compile_graph(
    module: Any,
    example_inputs: Sequence[Any],
    *,
    compiler: Callable[..., Any],
    decompositions: Any,
    partition: Callable[..., Any],
) -> Callable[..., Any]:
    """AOTAutograd over a Dynamo graph; `compiler(kind, graph)` gets functional ATen graphs.

    What it returns takes its arguments in a list.
    """
    from torch._functorch.aot_autograd import aot_module_simplified

    def of_kind(kind: GraphKind) -> Callable[..., Any]:
        def boxed(graph: Any, inputs: Sequence[Any]) -> Any:
            call = compiler(kind, graph)
            if kind is GraphKind.BACKWARD:
                call = _in_any_state(call, _tangent_places(graph))
            call._boxed_call = True
            return call

        return boxed

    with _own_settings(), _tangents_without_overlap(), _whole_resampling():
        compiled: Callable[..., Any] = aot_module_simplified(
            module,
            example_inputs,
            fw_compiler=of_kind(GraphKind.FORWARD),
            bw_compiler=of_kind(GraphKind.BACKWARD),
            inference_compiler=of_kind(GraphKind.INFERENCE),
            decompositions=decompositions,
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )
    tracing = TracingContext.try_get()
    if tracing is not None and tracing.fw_metadata is not None:
        # Otherwise the list is None, which the check for retain_graph treats as a full one.
        tracing.fw_metadata.bw_donated_idxs = []
    return compiled


def _own_settings() -> Any:
    """A block with the settings of AOTAutograd that differ from its defaults."""
    from torch._functorch import config as functorch_config

    # Donated buffers would forbid backward(retain_graph=True), and we do not overwrite them. A
    # backward runs outside of autocast regions, as in eager: the forward has made the casts.
    wanted = {"donated_buffer": False, "backward_pass_autocast": "off"}
    known = {name: value for name, value in wanted.items() if hasattr(functorch_config, name)}
    return functorch_config.patch(known)


def _tangent_places(graph: Any) -> list[int]:
    """Which inputs of a backward are the gradients of its results."""
    names = [str(node.target) for node in graph.graph.find_nodes(op="placeholder")]
    return [place for place, name in enumerate(names) if name.startswith("tangents_")]


def _in_any_state(call: Callable[..., Any], tangents: Sequence[int]) -> Any:
    """The backward as it was traced: no guard checks the state that it is called in.

    Nor does one check gradients, which may be negative or conjugate views of their memory.
    """

    def run(args: list[Any]) -> Any:
        for place in tangents:
            if isinstance(args[place], torch.Tensor):
                args[place] = as_stored(args[place])
        if not is_autocast_enabled():
            return call(args)
        with disabled_autocast():
            return call(args)

    return run


@contextmanager
def _tangents_without_overlap() -> Iterator[None]:
    """Gradients of outputs whose elements overlap are traced as contiguous.

    PyTorch assumes that a gradient has the strides of its output and copies it to such memory. In
    the memory of `x.unfold(0, 2, 1)`, elements of the gradient would overwrite each other.
    """
    from torch._functorch._aot_autograd.schemas import MemoryFormatMeta

    original = MemoryFormatMeta.from_tensor

    def from_tensor(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(tensor, *args, **kwargs)
        if found is None or found.stride is None or not overlaps(tensor.shape, tensor.stride()):
            return found
        return MemoryFormatMeta(memory_format=torch.contiguous_format)

    patched: Any = MemoryFormatMeta
    patched.from_tensor = staticmethod(from_tensor)
    try:
        yield
    finally:
        patched.from_tensor = staticmethod(original)


@contextmanager
def _whole_resampling() -> Iterator[None]:
    """Resampling is differentiated as one op, as eager does.

    PyTorch's Python dispatcher replaces it by indexing before autograd sees it, so that its
    gradient would be a scatter: seven times as slow as eager's kernel on a CPU.
    """
    kept = _resampling_rules()
    with _resampling_lock:
        _tracers.append(None)
        if len(_tracers) == 1:
            for op, (_, whole) in kept.items():
                _set_rules(op, whole)
    try:
        yield
    finally:
        with _resampling_lock:
            _tracers.pop()
            if not _tracers:
                for op, (rules, _) in kept.items():
                    _set_rules(op, rules)


_REPLACING = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
_tracers: list[None] = []  # threads may trace at once: the last one brings PyTorch's rules back
_resampling_lock = Lock()


@cache
def _resampling_rules() -> dict[Any, tuple[dict[Any, Any], dict[Any, Any]]]:
    """PyTorch's rules of each op that replace it, by dispatch key, and ours."""
    composite = DispatchKey.CompositeImplicitAutograd
    found = {}
    for packet in (getattr(torch.ops.aten, name) for name in _RESAMPLING):
        for op in (packet.default, packet.vec):
            rules = {key: op.py_kernels[key] for key in _REPLACING if key in op.py_kernels}
            is_sized = op is packet.vec and composite in rules
            whole = {composite: _resampled(packet.default, rules[composite])} if is_sized else {}
            found[op] = rules, whole
    return found


def _set_rules(op: Any, rules: dict[Any, Any]) -> None:
    for key in _REPLACING:
        op.py_kernels.pop(key, None)
    op.py_kernels.update(rules)
    op._dispatch_cache.clear()


def _resampled(op: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Resampling to sizes or by factors as `op`: PyTorch's own kernel takes no symbolic sizes.

    Where a shape function of the op or of its gradient refuses the sizes, `rule` is traced: of an
    empty batch, and symbolic ones where the gradient has no such function in Python.
    """
    backward = getattr(torch.ops.aten, f"{op.__name__.split('.')[0]}_backward").default
    takes_symbols = DispatchKey.Meta in backward.py_kernels

    def resampled(x: torch.Tensor, given: Any, *args: Any) -> Any:
        *options, factors = args
        sizes = upsample_compute_output_size(x.shape, given, factors)  # type: ignore[no-untyped-call]
        is_symbolic = not all(isinstance(n, int) for n in (*x.shape, *sizes))
        if is_known_empty(x) or (is_symbolic and not takes_symbols):
            return rule(x, given, *args)
        return op(x, sizes, *options, *(factors or [None] * len(sizes)))

    return resampled


@dataclass(frozen=True, slots=True)
class SimpleMetadata:
    """AOTAutograd's analysis of a graph that needs none of its runtime's special cases."""

    written: tuple[int, ...]  # inputs that the graph overwrites, as autograd sees it
    output_needs_grad: tuple[bool, ...]
    tangent_outputs: tuple[int, ...]  # the outputs whose gradients the backward takes, in order
    num_saved_sizes: int  # numbers that the forward saves, after the tensors


def simple_metadata(takes_any_size: bool = False) -> SimpleMetadata | str:
    """AOTAutograd's last analysis, or why it is not simple: saved sizes need `takes_any_size`."""
    tracing = TracingContext.try_get()
    found = None if tracing is None else tracing.fw_metadata
    if tracing is None or found is None:
        return "no_metadata"
    if tracing.guards_context.aotautograd_guards:
        return "alias_guards"
    reason = _reason_not_simple(found)
    if reason is not None:
        return reason
    if found.num_symints_saved_for_bw and not takes_any_size:
        return "sizes"
    descriptions: list[Any] = found.traced_tangents_descs
    tangents = [getattr(desc.output, "idx", None) for desc in descriptions]
    return SimpleMetadata(
        tuple(found.mutated_graph_handled_indices_seen_by_autograd),
        tuple(bool(info.requires_grad) for info in found.output_info),
        tuple(index for index in tangents if index is not None),
        int(found.num_symints_saved_for_bw or 0),
    )


def _reason_not_simple(found: Any) -> str | None:
    kinds = {info.output_type.name for info in found.output_info}
    plain = {type(meta).__name__ for meta in found.subclass_inp_meta} <= {"PlainTensorMeta"}
    outputs = {type(desc.output).__name__ for desc in found.traced_tangents_descs}
    reasons = {
        "aliased_output": not kinds <= {"non_alias", "unsafe_view_alias"},
        "mutation_after_graph": found.num_mutated_inp_runtime_indices > 0,
        "intermediate_base": found.num_intermediate_bases > 0,
        "metadata_mutation": any(info.mutates_metadata for info in found.input_info),
        "storage_mutation": any(info.mutates_storage_metadata for info in found.input_info),
        "grad_mode_change": found.grad_enabled_mutation is not None,
        "subclass": not plain or not outputs <= {"PlainAOTOutput"},
        "effects": bool(found.tokens) or bool(found.num_backward_tokens),
        "random_state": bool(found.is_rng_op_functionalized) or found.num_graphsafe_rng_states > 0,
        "mutation_in_backward": bool(
            found.indices_of_inputs_that_requires_grad_with_mutations_in_bw
        ),
        "opaque": bool(found.num_opaque_objects_saved_for_bw),
        "unchecked_saved": bool(found.num_tensors_saved_with_no_vc_check),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def merges_arguments(inputs: Sequence[Any]) -> bool:
    """Whether the graph just traced takes the base of several arguments instead of each."""
    known = _input_info()
    return known is not None and len(known) < len(inputs)


def writes_overlapping(inputs: Sequence[Any]) -> bool:
    """Whether the graph just traced writes to an argument with several elements in one place.

    Where it takes the base of several arguments, all count as written: what AOTAutograd knows is
    about the base.
    """
    known = _input_info()
    if known is None:
        return False
    facts = zip(inputs, known, strict=False)
    is_merged = len(known) < len(inputs)
    written = inputs if is_merged else [x for x, info in facts if info.mutates_data]
    return any(isinstance(x, torch.Tensor) and _overlaps_now(x) for x in written)


def _input_info() -> Sequence[Any] | None:
    tracing = TracingContext.try_get()
    found = None if tracing is None else tracing.fw_metadata
    return None if found is None else found.input_info


def _overlaps_now(tensor: torch.Tensor) -> bool:
    """Whether elements overlap; where sizes are dynamic, a guard keeps them from it later."""
    if tensor.layout is not torch.strided:
        return False
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    dims = sorted(pairs, key=lambda dim: (size_hint(dim[0]), size_hint(dim[1])))
    seen = [(size_hint(step), size_hint(size)) for step, size in dims]
    if any(size == 0 for _, size in seen):
        return False
    is_known = all(has_hint(n) for dim in dims for n in dim)
    return overlap_in_order(seen) or (is_known and overlap_in_order(dims))


@dataclass(frozen=True, slots=True)
class OverwrittenAlias:
    """A result that shares memory with an overwritten input: places in the graph."""

    result: int
    of_input: int
    value: int | None  # the result that the caller overwrites the input with, if the graph does not


def overwritten_aliases() -> list[OverwrittenAlias]:
    """The aliases that AOTAutograd restores by the strides and offsets of what a graph returns.

    It repeats the views themselves where they depend on no size. Inputs whose own strides change,
    tensor subclasses and ordered effects have other places.
    """
    tracing = TracingContext.try_get()
    found: Any = None if tracing is None else tracing.fw_metadata
    if found is None or found.tokens:
        return []
    if {type(meta).__name__ for meta in found.subclass_inp_meta or ()} - {"PlainTensorMeta"}:
        return []
    returned = list(found.mutated_inp_runtime_indices)
    return [
        OverwrittenAlias(len(returned) + place, base, _place_in(returned, base))
        for place, info in enumerate(found.output_info)
        if info.output_type.name == "alias_of_input" and not _is_repeated(info)
        for base in (info.base_idx,)
        if found.input_info[base].mutates_data and not found.input_info[base].mutates_metadata
    ]


def _place_in(values: Sequence[int], value: int) -> int | None:
    return values.index(value) if value in values else None


def _is_repeated(info: Any) -> bool:
    """Whether AOTAutograd makes a view of an input by the ops that made it."""
    views = info.view_meta_sequence
    return views is not None and not any(view.has_symbolic_inputs for view in views.sequence)


def static_inputs() -> tuple[int, ...]:
    """The inputs of the graph being compiled that are parameters or buffers of modules."""
    tracing = TracingContext.try_get()
    found = None if tracing is None else tracing.fw_metadata
    return () if found is None else tuple(found.static_input_indices or ())


def saved_output_description(index: int, is_unchecked: bool) -> Any:
    """AOTAutograd's name for the `index`-th value a forward saves, None where it keeps none."""
    name = "SavedForBackwardsNoVcCheckAOTOutput" if is_unchecked else "SavedForBackwardsAOTOutput"
    kind = getattr(_descriptors, name, None)
    return None if kind is None else kind(index)


def is_backward_state(node: Any) -> bool:
    """A placeholder that carries compiled autograd's hooks instead of a tensor."""
    return isinstance(node.meta.get("val"), BackwardState)


def mutated_descriptions(descriptions: Sequence[Any]) -> list[Any]:
    """AOTAutograd's names of the inputs whose new value is one of the described results."""
    kind = _descriptors.InputMutationAOTOutput
    return [item.mutated_input for item in descriptions if isinstance(item, kind)]


def release_saved(ctx: Any) -> None:
    """In a backward, release the saved tensors now, unless the graph is retained."""
    ctx.maybe_clear_saved_tensors()


def function_apply(function: Any) -> Callable[..., Any]:
    """`function.apply`, without what it does for functions that Dynamo did not call.

    Dynamo's guards admit no tensor that is left over from a transform of torch.func.
    """
    private: Any = torch._C
    direct: Callable[..., Any] = super(torch.autograd.Function, function).apply
    are_transforms_active: Callable[[], bool] = private._are_functorch_transforms_active

    def apply(*args: Any) -> Any:
        return function.apply(*args) if are_transforms_active() else direct(*args)

    return apply


def call_backward_directly(function: Any) -> Any:
    """The function, with autograd's engine calling its backward itself, not what looks it up."""
    function._backward_cls.apply = function.backward
    return function


_edge_to: Any = torch._C._functions.DelayedError("perfuse: this is only an edge", 1)
# Perfuse may be imported where tensors are created elsewhere: in a block of `torch.device("meta")`.
with disable_dispatch_modes():
    _NOTHING = torch.empty(0, device="cpu")


def with_edge_to(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without elements that autograd's graph leads from to what made `tensor`."""
    edge: torch.Tensor = _edge_to(tensor)
    edge.data = _NOTHING  # it would keep the memory of `tensor`
    return edge
