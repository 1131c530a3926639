"""The one graph of a call that `aot_compile` captures, compiles and runs once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from perfuse.capture.device import device_of
from perfuse.capture.facts import facts_or_reason
from perfuse.capture.freeze import refuse_frozen
from perfuse.capture.request import Request
from perfuse.capture.restore import left_as_they_were, slots_of
from perfuse.capture.trace import TrainingGraphs
from perfuse.config import Settings
from perfuse.context import Context
from perfuse.errors import ArtefactError, PerfuseError
from perfuse.pipeline import Compiled
from perfuse.runtime.tree import NumberResult
from perfuse.runtime.wrapper import RuntimeFacts, wrap
from perfuse.torch_compat.autograd import writes_overlapping
from perfuse.torch_compat.dynamo import GraphBreak, untied_sizes
from perfuse.torch_compat.graphs import is_drawn_number, tree_leaves, tree_map
from perfuse.torch_compat.guards import traced_forms

ONE_GRAPH = (
    "move this out of the function, or compile the parts separately; "
    "torch._dynamo.explain(fn)(*args) lists every graph break."
)
NOT_FIXED = "a Python number that depends on sizes or data"
NOTHING = "compile a function of tensors: nothing else takes time."
DRAWN = "draw them with torch.rand, or pass them as a tensor."
IN_PLACE = "copy the new values into the tensor (tensor.copy_(new)), or return them."
AS_TENSOR = "return it as a tensor, or return the sizes it is computed from."


def own_tensors(arguments: Any, is_dynamic: bool) -> Any:
    """Nested arguments with new tensors on the same memory.

    A tensor that is passed twice, or is also a parameter, would be one input of the graph. Where
    sizes are dynamic, strides must follow from them: a slice is copied.
    """

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        made = leaf.detach()
        if is_dynamic and torch.empty_like(made).stride() != made.stride():
            made = made.contiguous()
        return made.requires_grad_(leaf.requires_grad)

    return tree_map(own, arguments)


@dataclass(slots=True)
class CapturedCall:
    """The one graph of a call: what went in, what it compiled to, what came out."""

    settings: Settings
    arguments: Sequence[torch.Tensor]  # the tensors among the function's arguments
    is_dynamic: bool
    context: Context | None = None  # known once the graph's device is
    graphs: list[Compiled] = field(default_factory=list)  # one, or forward and backward
    traced: list[Any] = field(default_factory=list)  # the inputs as traced: sizes may be symbolic
    # The arguments as traced, by id; an argument that tracing did not look at is missing.
    traced_arguments: dict[int, torch.Tensor] = field(default_factory=dict)
    inputs: list[Any] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    result: Any = None  # what the function returned, with these results in it
    facts: RuntimeFacts | None = None

    def backend(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Dynamo's backend: compiles as usual, and records graphs, inputs and results."""
        if self.graphs:
            raise ArtefactError("the function needs more than one graph", hint=ONE_GRAPH)
        refuse_frozen(self.settings, "an artefact")
        if any(map(is_drawn_number, module.graph.nodes)):
            raise ArtefactError("the function draws numbers with Python's random", hint=DRAWN)
        context = self.context = Context.on(device_of(module, inputs), self.settings)
        graphs = TrainingGraphs(context, [self.graphs.append])
        graphs.capture.trace(module, inputs)
        found = facts_or_reason(graphs.capture.graphs, len(inputs), takes_any_size=True)
        if isinstance(found, str):
            raise _refused(found)
        self.facts = found
        self.traced = [
            node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")
        ]
        if writes_overlapping(self.traced):
            raise _refused("writes_to_elements_that_overlap_in_memory")
        for tensor, like in zip(self.arguments, traced_forms(module, self.arguments), strict=True):
            if like is not None:
                self.traced_arguments[id(tensor)] = like
        back = graphs.backward() if self.facts.is_training else None
        backward = None if back is None else partial(getattr, back, "call")
        run = wrap(graphs.forward.call, backward, self.facts)
        written = self.facts.written

        def call(*args: Any) -> Any:
            with left_as_they_were([args[i] for i in written]):
                self.inputs, self.results = list(args), list(run(*args))
            self.results = [_noted(value, k) for k, value in enumerate(self.results)]
            return self.results

        return call


def _noted(result: Any, place: int) -> Any:
    if isinstance(result, bool | float):
        raise ArtefactError(f"a result is {NOT_FIXED}", hint=AS_TENSOR)
    return NumberResult.of(result, place) if type(result) is int else result


def _refused(reason: str) -> ArtefactError:
    """The error for a graph that needs more of AOTAutograd's runtime than an artefact has."""
    if reason in ("aliased_output", "intermediate_base", "alias_guards"):
        message = "the function returns views of its arguments, or several views of one result"
        return ArtefactError(message, hint="return copies (.clone()).")
    message = f"an artefact cannot represent this function: {reason.replace('_', ' ')}"
    return ArtefactError(message, hint="use torch.compile(fn, backend='perfuse') instead.")


def _check_numbers(capture: CapturedCall) -> None:
    """Refuse results that are numbers and would wrongly be constants in the artefact."""
    leaves = tree_leaves(capture.result, lambda value: isinstance(value, torch.Size))
    for leaf in leaves:
        is_shape = capture.is_dynamic and isinstance(leaf, torch.Size)
        if is_shape and any(type(size) is int for size in leaf):
            raise ArtefactError(
                "a result is the shape of a tensor, whose sizes are not fixed",
                hint="return tuple(x.size()), or the tensor itself.",
            )
    # Dynamo turns a tensor that the graph returns and nothing else reads into a Python float.
    given = {id(leaf) for leaf in leaves}
    scalars = [v for v in capture.results if isinstance(v, torch.Tensor) and v.dim() == 0]
    if any(id(v) not in given for v in scalars) and any(type(leaf) is float for leaf in leaves):
        raise ArtefactError(f"a result is {NOT_FIXED}", hint=AS_TENSOR)


@contextmanager
def _same_tensors(
    capture: CapturedCall, request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[None]:
    """A block that must not exchange what the function holds and reads, or change its arguments.

    An artefact does neither: its next call would read what was there before.
    """
    slots = slots_of(request.function)
    given = _identities([args, kwargs])
    try:
        yield
    finally:
        replaced = [slot for slot in slots if slot.put_back()]
    read = set(map(id, capture.inputs))
    tensors = [slot for slot in replaced if isinstance(slot.value, torch.Tensor)]
    lost = next((slot.name for slot in tensors if id(slot.value) in read), None)
    if lost is not None:
        message = f"the function puts another tensor in the place of {lost!r}, which it reads"
        raise ArtefactError(message, hint=IN_PLACE)
    if _identities([args, kwargs]) != given:
        message = "the function changes a list or dictionary that it is given"
        raise ArtefactError(message, hint="return what it puts there.")


def _identities(value: Any) -> Any:
    """Nested arguments, with the identity of each tensor in its place."""
    return tree_map(lambda leaf: id(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def capture_call(
    request: Request, args: tuple[Any, ...], kwargs: dict[str, Any], is_training: bool
) -> CapturedCall:
    leaves = [leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, torch.Tensor)]
    capture = CapturedCall(request.settings(), leaves, bool(request.is_dynamic))
    sizes = untied_sizes() if request.is_dynamic else nullcontext()
    with torch.set_grad_enabled(is_training), sizes, _same_tensors(capture, request, args, kwargs):
        try:
            capture.result = request.call(args, kwargs, capture.backend)
        except Exception as error:
            own = getattr(error, "inner_exception", None)  # what Dynamo wraps
            if isinstance(own, PerfuseError):
                raise own from None
            found = GraphBreak.of(error)
            if found is None:
                raise
            message = f"the function cannot be captured as one graph: {found.reason}"
            raise ArtefactError(message, at=found.line, hint=ONE_GRAPH) from error
    if not capture.graphs or capture.facts is None:
        raise ArtefactError("the function has no tensor operations", hint=NOTHING)
    _check_numbers(capture)
    if is_training and not capture.facts.is_training:
        raise ArtefactError(
            "there is nothing to train: no result depends on a tensor that requires a gradient",
            hint="remove training=True, or set requires_grad on arguments or parameters.",
        )
    return capture
