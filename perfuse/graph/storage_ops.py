"""ATen ops whose meaning depends on storage, offsets or strides, and how each is handled.

A program keeps its temporaries in memory of its own: views of one arena, at offsets of our
choice, some never stored at all. An op that reads no more of a tensor than shape and elements does
not notice. The ops listed here do, or return tensors that share memory, so each has a treatment and
a reason. A test compares the list with the operators PyTorch registers.
"""

from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any


class Treatment(Enum):
    """How a program handles an op that depends on more than elements."""

    LOWERED = "computed from indices; where that fails, called on eager's own storage"
    OWNED = "called on a tensor at the start of its own storage, or on the input it is a view of"
    HELD = "called on memory that is not reused: its result keeps its arguments"
    VIEW = "lowered to another index of the same elements, or to a window on the same buffer"
    ELEMENTS = "reads shape and elements alone; the strides of its result are the traced ones"
    TRACED = "answered or removed while tracing: no program contains it"
    FOREIGN = "for tensors that programs only carry (sparse, nested, quantised): ATen's own results"


# Reasons by treatment, and for each the ops: names without overload, in the aten namespace.
_REASONS: dict[Treatment, dict[str, str]] = {
    Treatment.LOWERED: {
        "sizes, strides and offset address the storage directly": """
            as_strided as_strided_copy as_strided_scatter""",
    },
    Treatment.OWNED: {
        "the storage offset must be divisible by the ratio of the element sizes": """
            view_as_complex view_as_complex_copy""",
        "view(dtype) reinterprets bytes: offset and innermost stride must fit the new element": """
            view.dtype view_copy.dtype""",
    },
    Treatment.HELD: {
        "the tensors that it is given are the indices and values of the result": """
            _sparse_bsc_tensor_unsafe _sparse_bsr_tensor_unsafe _sparse_compressed_tensor_unsafe
            _sparse_coo_tensor_unsafe _sparse_coo_tensor_with_dims_and_tensors
            _sparse_csc_tensor_unsafe _sparse_csr_tensor_unsafe sparse_bsc_tensor sparse_bsr_tensor
            sparse_compressed_tensor sparse_coo_tensor sparse_csc_tensor sparse_csr_tensor""",
        "an input takes over the storage of the tensor that is assigned to its data": """
            set_ shallow_copy_data_""",
    },
    Treatment.VIEW: {
        "the same elements by another index; what shares memory in eager is one buffer here": """
            alias detach diagonal expand permute select slice split split_with_sizes squeeze t
            transpose unbind unfold unsqueeze view _reshape_alias lift_fresh""",
        "a view of a complex tensor, or one as real numbers: a call on the carried tensor": """
            _conj _neg_view view_as_real""",
    },
    Treatment.ELEMENTS: {
        "a copy of what the view shows": """
            _conj_copy _lazy_clone _neg_view_copy _reshape_alias_copy _reshape_copy _to_copy
            _unsafe_view alias_copy clone unfold_backward unfold_copy view_as_real_copy view_copy
            chalf _foreach_clone detach_copy diagonal_copy expand_copy permute_copy select_copy
            slice_copy split_copy split_with_sizes_copy squeeze_copy t_copy transpose_copy
            unbind_copy unsqueeze_copy lift_fresh_copy""",
        "new memory with the traced strides; its contents are written before any read": """
            empty empty_like empty_strided full_like new_empty_strided ones_like rand_like
            randint_like randn_like zeros_like""",
        "a scatter into a copy: lowered to a formula; the call clones the storage it is given": """
            diagonal_scatter select_scatter slice_scatter slice_inverse""",
    },
    Treatment.TRACED: {
        "composite: tracing sees the views and copies that it is made of": """
            adjoint broadcast_to chunk conj contiguous dsplit expand_as flatten hsplit imag
            linalg_diagonal mH mT matrix_H moveaxis movedim narrow numpy_T positive ravel real
            reshape reshape_as resolve_conj resolve_neg swapaxes swapdims tensor_split to unflatten
            view_as vsplit type_as cpu cuda _autocast_to_full_precision
            _autocast_to_reduced_precision as_tensor _grad_sum_to_size""",
        "a question about layout: Dynamo answers from the traced tensor and guards the answer": """
            is_contiguous is_non_overlapping_and_dense is_pinned is_set_to is_strides_like_format
            storage_offset stride sym_is_contiguous sym_storage_offset sym_stride
            _has_same_storage_numel is_same_size dense_dim is_conj is_neg _is_zerotensor is_complex
            is_floating_point is_signed is_inference is_leaf is_coalesced is_distributed is_nonzero
            cudnn_is_acceptable _has_compatible_shallow_copy_type""",
        "changes the storage of a tensor: removed by functionalization, or a graph break": """
            as_strided_ resize resize_ resize_as resize_as_ set_data _resize_output
            _resize_output_ _copy_from_and_resize""",
        "of autograd, autocast or TorchScript: no kernel of its own": """
            _fw_primal _make_dual _unpack_dual _ncf_unsqueeze _ncf_view _unwrap_optional __getitem__
            __is__ get keys local_value to_here is_owner is_autocast_cpu_enabled is_autocast_enabled
            is_grad_enabled is_scripting _is_tracing is_vulkan_available set_grad_enabled
            _reshape_from_tensor _set_item _cufft_set_plan_cache_max_size _is_all_true _is_any_true
            _make_dep_token _test_autograd_multiple_dispatch_view
            _test_autograd_multiple_dispatch_view_copy""",
    },
    Treatment.FOREIGN: {
        "axes with names, which Dynamo does not trace": """
            align_to refine_names rename""",
        "sparse, nested, quantised or MKL-DNN tensors, and pinned memory": """
            _coalesced_ _indices _indices_copy _mkldnn_reshape
            _nested_compute_contiguous_strides_offsets _nested_from_padded
            _nested_from_padded_and_nested_example _nested_from_padded_tensor
            _nested_get_jagged_dummy _nested_get_lengths _nested_get_max_seqlen
            _nested_get_min_seqlen _nested_get_offsets _nested_get_ragged_idx _nested_get_values
            _nested_get_values_copy _nested_select_backward _nested_sum_backward
            _nested_tensor_from_mask _nested_tensor_from_mask_left_aligned
            _nested_tensor_from_tensor_list _nested_tensor_size _nested_tensor_softmax_with_shape
            _nested_tensor_storage_offsets _nested_tensor_strides _nested_view_from_buffer
            _nested_view_from_buffer_copy _nested_view_from_jagged _nested_view_from_jagged_copy
            _pin_memory _sparse_broadcast_to _sparse_broadcast_to_copy _values _values_copy
            ccol_indices ccol_indices_copy coalesce col_indices col_indices_copy crow_indices
            crow_indices_copy indices indices_copy nested_to_padded_tensor pin_memory
            resize_as_sparse resize_as_sparse_ row_indices row_indices_copy sparse_resize
            sparse_resize_ sparse_resize_and_clear sparse_resize_and_clear_ values values_copy
            _empty_affine_quantized _empty_per_channel_affine_quantized empty_quantized""",
    },
}
_ROWS = [
    (name, (treatment, reason))
    for treatment, reasons in _REASONS.items()
    for reason, names in reasons.items()
    for name in names.split()
]
TREATMENTS: dict[str, tuple[Treatment, str]] = dict(_ROWS)
assert len(TREATMENTS) == len(_ROWS), "an op is listed twice"

# Treatments of ops that see more of their first argument than its elements.
SEEING = frozenset({Treatment.LOWERED, Treatment.OWNED})


def treatment_of(name: str) -> Treatment | None:
    """How `view.dtype`, or any overload of `view`, is treated; None if it is not listed."""
    found = TREATMENTS.get(name) or TREATMENTS.get(name.partition(".")[0])
    return found[0] if found is not None else None


@cache
def storage_treatment(target: Any) -> Treatment | None:
    """The treatment of a call's target; None for ops that only read shape and elements."""
    namespace, _, name = str(target).partition(".")
    return treatment_of(name) if namespace in ("aten", "prims") else None


def addressed_bases(options: Mapping[str, Any]) -> set[int]:
    """Which of `_all_bases` an `auto_functionalized_v2` addresses by places in storage.

    The views of it that an op writes to are given by sizes, strides and offset, where no slice is.
    """
    suffix = "_storage_offset"
    names = [name.removesuffix(suffix) for name in options if name.endswith(suffix)]
    return {options[f"{name}_base_index"] for name in names}
