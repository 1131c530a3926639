"""`RuntimeFacts` and `wrap`: running a compiled forward, with its backward, without AOTAutograd.

AOTAutograd's runtime can undo every kind of aliasing and mutation. Most graphs have neither: for
those, this is enough, and it can be rebuilt in a new process from plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from perfuse.forking import ForkLock
from perfuse.runtime.host_names import Call, with_strides
from perfuse.runtime.size_formula import size_value
from perfuse.torch_compat.autograd import (
    call_backward_directly,
    function_apply,
    release_saved,
    with_edge_to,
)
from perfuse.torch_compat.state import (
    disabled_autocast,
    has_tangent,
    is_autocast_enabled,
    is_forward_mode,
)
from perfuse.torch_compat.tensors import as_stored, is_as_stored, is_batched, is_view_of_another

BATCHED = (
    "perfuse: the backward of a compiled graph takes one gradient at a time; call it without "
    "is_grads_batched (jacobian without vectorize, no vmap), or the function without torch.compile"
)


@dataclass(frozen=True, slots=True)
class Tangent:
    """The gradient of one output, with the strides that the backward was traced with."""

    output: int
    dtype: str
    shape: tuple[Any, ...]  # numbers, or formulas over the names of sizes
    strides: tuple[Any, ...]
    device: str

    def sized(self, sizes: Mapping[str, int]) -> Tangent:
        """This tangent in a call with these sizes."""
        shape, strides = (
            tuple(n if isinstance(n, int) else size_value(n, sizes) for n in numbers)
            for numbers in (self.shape, self.strides)
        )
        return Tangent(self.output, self.dtype, shape, strides, self.device)

    def made_from(self, gradient: Tensor | None) -> Tensor:
        """The gradient with the backward's strides; zeros if there is none."""
        if gradient is None:
            dtype = getattr(torch, self.dtype)
            made = torch.empty_strided(self.shape, self.strides, dtype=dtype, device=self.device)
            return made.zero_()
        if gradient.dim() != len(self.shape):  # traced in PyTorch 2.11 with an axis of one too many
            gradient = gradient.reshape(self.shape)
        return with_strides(as_stored(gradient), self.strides)


@dataclass(frozen=True, slots=True)
class RuntimeFacts:
    """How to handle the arguments and results of a simple graph."""

    num_inputs: int
    num_outputs: int
    written: tuple[int, ...]  # inputs that the program overwrites where autograd would see it
    without_grad: tuple[int, ...]  # outputs that no gradient flows into
    tangents: tuple[Tangent, ...]  # empty for inference
    is_training: bool
    is_autocast: bool
    # With dynamic sizes: those that determine tangents, each with the input that is it or
    # has it as a dimension, and how many numbers are saved for the backward after the tensors.
    sizes: tuple[tuple[str, int, int | None], ...] = ()
    num_saved_sizes: int = 0


def facts_from(document: Mapping[str, Any]) -> RuntimeFacts:
    """The facts from which `dataclasses.asdict` made this document."""
    tangents = tuple(
        Tangent(t["output"], t["dtype"], tuple(t["shape"]), tuple(t["strides"]), t["device"])
        for t in document["tangents"]
    )
    lists = {name: tuple(document[name]) for name in ("written", "without_grad")}
    sizes = tuple((name, place, dim) for name, place, dim in document.get("sizes", ()))
    return RuntimeFacts(**{**document, **lists, "tangents": tangents, "sizes": sizes})


def wrap(
    forward: Call, backward: Callable[[], Call] | None, facts: RuntimeFacts
) -> Callable[..., Any]:
    """Wrap a capture for Dynamo: tensors in, tensors out. `backward` is called on first use."""
    run = _marked(forward, facts)
    if not facts.is_training:
        return _quiet(run)
    assert backward is not None
    apply = function_apply(_function(run, _on_first_use(backward), facts))

    def train(*args: Any) -> Any:
        # The graph may switch gradients on by itself: it does, or it would be an inference graph.
        if is_grad_enabled():
            return apply(*args)
        with torch.enable_grad():
            return apply(*args)

    return train


# A call costs the host as much as all its kernels cost a small graph: what follows looks names up
# once, adds no Python frame, and enters a context only where that changes something.
is_grad_enabled = torch.is_grad_enabled


def _quiet(call: Call) -> Callable[..., Any]:
    """The call with gradients off."""

    def quiet(*args: Any) -> Any:
        if is_forward_mode():
            _check_tangents(args)
        if not is_grad_enabled():
            return call([*args])
        with torch.no_grad():
            return call([*args])

    return quiet


def without_tangents(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, which refuses arguments with tangents."""

    def checked(*args: Any) -> Any:
        if is_forward_mode():
            _check_tangents(args)
        return call(*args)

    return checked


def _check_tangents(args: Sequence[Any]) -> None:
    """No guard of Dynamo's checks this, and kernels would leave tangents out of their results."""
    if has_tangent(args):
        raise NotImplementedError(
            "perfuse: a compiled graph has no forward-mode derivatives; "
            "call the function without torch.compile inside forward_ad.dual_level()"
        )


def _marked(call: Call, facts: RuntimeFacts) -> Call:
    """The call with autocast off, and written inputs marked as such."""
    written, is_autocast = facts.written, facts.is_autocast
    if not written and not is_autocast:
        return call

    def run(args: list[Any]) -> tuple[Any, ...]:
        touched = [args[i] for i in written]
        results = _plainly(call, args, is_autocast)
        if touched:
            torch.autograd.graph.increment_version(touched)
        return results

    return run


def _plainly(call: Call, args: list[Any], is_autocast: bool) -> tuple[Any, ...]:
    if not is_autocast:
        return call(args)
    with disabled_autocast():
        return call(args)


def _on_first_use(make: Callable[[], Call]) -> Callable[[], Call]:
    """A getter of the call, which is created once, on first use."""
    made: list[Call] = []
    lock = ForkLock()

    def get() -> Call:
        if not made:
            with lock:
                if not made:
                    made.append(make())
        return made[0]

    return get


def _function(run: Call, backward: Callable[[], Call], facts: RuntimeFacts) -> Any:
    num_outputs, without_grad, fixed = facts.num_outputs, facts.without_grad, facts.tangents
    is_autocast, num_sizes = facts.is_autocast, facts.num_saved_sizes
    is_dynamic, edges_behind = bool(facts.sizes or num_sizes), _edge_finder()

    class CompiledGraph(torch.autograd.Function):
        """One graph's forward and backward; both are run with gradients off."""

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            # A window on memory becomes a separate tensor: autograd may refuse to write to a view.
            results = [
                value.detach() if isinstance(value, Tensor) and is_view_of_another(value) else value
                for value in run([*args])
            ]
            outputs = tuple(results[:num_outputs])
            if is_dynamic:
                ctx.sizes = _sizes_of(args, facts)
                ctx.saved_sizes = [results.pop() for _ in range(num_sizes)][::-1]
            ctx.edges = edges_behind(args)  # no saved tensors: hooks on these would see them
            ctx.save_for_backward(*results[num_outputs:])
            ctx.set_materialize_grads(False)
            if without_grad:
                ctx.mark_non_differentiable(*_tensors_at(without_grad, outputs))
            return outputs

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            args = [*ctx.saved_sizes, *ctx.saved_tensors] if is_dynamic else [*ctx.saved_tensors]
            release_saved(ctx)  # the program forgets each after its last use
            for tangent in [t.sized(ctx.sizes) for t in fixed] if is_dynamic else fixed:
                gradient = gradients[tangent.output]
                has_strides = gradient is not None and gradient.stride() == tangent.strides
                is_ready = has_strides and is_as_stored(gradient)
                args.append(gradient if is_ready else tangent.made_from(gradient))
            try:
                if is_grad_enabled():  # create_graph: the results must not look like constants
                    return _run_once(backward(), facts, ctx, args)
                # Unlike a forward, a backward may be called in any state: no guard checks it.
                return _plainly(backward(), args, is_autocast or is_autocast_enabled())
            except RuntimeError as error:
                _refuse_batched(gradients, error)
                raise

    return call_backward_directly(CompiledGraph)


def _refuse_batched(gradients: Sequence[Any], error: RuntimeError) -> None:
    """Name the cause of an error, where the gradients stand for many at once."""
    if any(map(is_batched, gradients)):
        raise NotImplementedError(BATCHED) from error


def _tensors_at(places: Sequence[int], values: Sequence[Any]) -> list[Tensor]:
    return [values[i] for i in places if isinstance(values[i], Tensor)]


def _sizes_of(args: Sequence[Any], facts: RuntimeFacts) -> dict[str, int]:
    """The sizes of one call, by name."""
    return {
        name: int(args[place] if dim is None else args[place].shape[dim])
        for name, place, dim in facts.sizes
    }


def _edge_finder() -> Callable[[Sequence[Any]], list[Tensor]]:
    """A function: for each argument that was computed, a stand-in that leads to what made it.

    Dynamo's guards fix which arguments are parameters, or need no gradients: the others are found
    in the first call.
    """
    places: list[int] | None = None

    def edges_behind(args: Sequence[Any]) -> list[Tensor]:
        nonlocal places
        if places is None:
            places = [i for i, a in enumerate(args) if type(a) is Tensor and a.requires_grad]
        computed = [args[i] for i in places if args[i].grad_fn is not None]
        if not computed:
            return computed
        with torch.enable_grad():
            return [with_edge_to(tensor) for tensor in computed]

    return edges_behind


def _leaves_before(node: Any) -> list[Tensor]:
    """The leaves among the arguments of this node of autograd's graph."""
    before = (follower for follower, _ in node.next_functions if hasattr(follower, "variable"))
    return [follower.variable for follower in before]


def _run_once(call: Call, facts: RuntimeFacts, ctx: Any, args: Sequence[Any]) -> Any:
    once, sources = cast(Any, _Once), [*ctx.edges, *_leaves_before(ctx)]
    return once.apply(call, facts, len(sources), *sources, *args)


class _Once(torch.autograd.Function):
    """A backward that can be run, but not differentiated: asking for that is an error."""

    @staticmethod
    def forward(ctx: Any, backward: Call, facts: RuntimeFacts, num_sources: int, *args: Any) -> Any:
        # The sources are arguments only so that second derivatives are asked for here too: those of
        # the compiled graph's own arguments, and of all that these were made from.
        is_autocast = facts.is_autocast or is_autocast_enabled()
        return _plainly(backward, list(args[num_sources:]), is_autocast)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "perfuse: the backward of a compiled graph cannot be differentiated again; "
            "call the function without torch.compile for double backward"
        )
