"""One thing the sweep judges: a module, its inputs, and how a user calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.harness.compare import cotangent

Call = tuple[tuple[Any, ...], dict[str, Any]]
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
Run = Callable[[nn.Module, Call, Compile], list[Tensor]]


class NotMade(Exception):
    """Why this one is left out."""


def forward(model: nn.Module, call: Call, compile_it: Compile) -> list[Tensor]:
    torch.manual_seed(0)
    args, kwargs = call
    with torch.no_grad():
        return numbers(compile_it(model)(*args, **kwargs))


def training_step(model: nn.Module, call: Call, compile_it: Compile) -> list[Tensor]:
    """Results, the gradients of parameters and inputs, and the buffers a step may have moved.

    Results are weighted by fixed numbers: the mean square of a normalised one has no gradient.
    """
    torch.manual_seed(0)
    args, kwargs = pytree.tree_map(leaf, call)
    outputs = numbers(compile_it(model)(*args, **kwargs))
    roots = [o for o in outputs if o.requires_grad]
    if roots:
        torch.autograd.backward(roots, [cotangent(r) for r in roots])
    inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    wanted = [x for x in (*model.parameters(), *inputs) if x.requires_grad]
    gradients = [torch.zeros(()) if x.grad is None else x.grad for x in wanted]
    return [o.detach() for o in outputs] + gradients + numbers(list(model.buffers()))


@dataclass(frozen=True, slots=True)
class Subject:
    model: nn.Module
    call: Call
    recipe: str = ""
    run: Run = forward
    # Whether more graphs than Dynamo alone makes are a failure. A float that changes between calls
    # is a symbol for a backend that takes symbols, and a recompile below AOTAutograd.
    counts_graphs: bool = True

    def training(self) -> Subject:
        return replace(self, model=self.model.train(), run=training_step)

    def channels_last(self) -> Subject:
        return replace(
            self,
            model=self.model.to(memory_format=torch.channels_last),
            call=pytree.tree_map(as_channels_last, self.call),
        )


def leaf(x: Any) -> Any:
    """A copy with the same strides, as a leaf of its own."""
    if not isinstance(x, Tensor):
        return x
    return x.detach().clone().requires_grad_(x.requires_grad)


def as_channels_last(x: Any) -> Any:
    if isinstance(x, Tensor) and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x


def numbers(outputs: Any) -> list[Tensor]:
    """The floats of any result: tuples, dictionaries and what libraries make of them."""
    found = pytree.tree_leaves(dict(outputs) if hasattr(outputs, "items") else outputs)
    return [x for x in found if isinstance(x, Tensor) and x.is_floating_point()]


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def deterministic(model: nn.Module) -> nn.Module:
    """Training in the comparison draws no random numbers."""
    for module in model.modules():
        for name in ("p", "drop_prob", "dropout", "drop_path_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def stirred(model: nn.Module) -> nn.Module:
    """Scales, biases and weights that start at a constant would hide what reads them."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel():
                if parameter.dim() <= 1 or bool((parameter == parameter.flatten()[0]).all()):
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def shallower(model: nn.Module) -> nn.Module:
    """The model without blocks that repeat an earlier one of the same sequence.

    A block that has the same modules, shapes and options makes the same kernels again.
    """
    for sequence in model.modules():
        if isinstance(sequence, nn.Sequential):
            seen: set[str] = set()
            for name, block in list(sequence.named_children()):
                signature = signature_of(block)
                if signature in seen and any(True for _ in block.children()):
                    del sequence._modules[name]
                seen.add(signature)
    return model


def signature_of(block: nn.Module) -> str:
    """All of a block but its numbers: modules, shapes, plain options."""
    lines = []
    for name, module in block.named_modules():
        options = {k: v for k, v in vars(module).items() if is_plain(v)}
        shapes = [tuple(p.shape) for p in module.parameters(recurse=False)]
        lines.append(f"{name} {type(module)} {sorted(options.items())} {shapes}")
    return "\n".join(lines)


def is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(is_plain(v) for v in value)
    return value is None or isinstance(value, (bool, int, float, str))


def accepted(subject: Subject) -> Subject:
    """The subject, once eager has run it and given numbers."""
    results = subject.run(subject.model, subject.call, lambda f: f)
    forget_graphs(subject.model)
    if not results:
        raise NotMade("no floats among the results")
    if not all(bool(r.isfinite().any()) for r in results if r.numel()):
        raise NotMade("eager gives no finite number")
    return subject


def forget_graphs(model: nn.Module) -> None:
    """Detach what modules keep of a run, or of a weight norm: `deepcopy` takes leaves only."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            leaves, tree = pytree.tree_flatten(value)
            if any(isinstance(x, Tensor) and not x.is_leaf for x in leaves):
                kept = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
                vars(module)[name] = pytree.tree_unflatten(kept, tree)


def why(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def variant_of(subject: Subject, variant: str) -> Subject:
    """The subject as the variant asks for it, once eager has run it."""
    if variant.endswith("channels_last"):
        if not any(p.dim() == 4 for p in subject.model.parameters()):
            raise NotMade("no weight of four dimensions: channels-last changes nothing")
        subject = subject.channels_last()
    return accepted(subject.training() if variant.startswith("train") else subject)
