"""Captures that look alike but differ must not be served each other's code."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

import perfuse
from perfuse.cache.access import open_store
from perfuse.context import Context


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    perfuse.counters.clear()
    with perfuse.testing.fresh_cache():
        yield


def again(function: Callable[..., Any], *args: Any) -> Any:
    """As a new process would: Dynamo has forgotten everything, the cache has not."""
    torch._dynamo.reset()
    return torch.compile(function, backend="perfuse", dynamic=False)(*args)


def test_the_same_function_is_loaded() -> None:
    x = torch.randn(5, 7)
    first, second = again(lambda x: x.tanh() * 3, x), again(lambda x: x.tanh() * 3, x)
    assert torch.equal(first, second)
    assert perfuse.counters["capture.cache_hit"] == 1
    assert perfuse.counters["capture.traced"] == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.tanh() * 4,
        lambda x: x.tanh() * 3.0000000001,
        lambda x: x.tanh() + 3,
        lambda x: (x.tanh() * 3).double(),
    ],
)
def test_another_function_is_not(change: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(5, 7)
    again(lambda x: x.tanh() * 3, x)
    assert torch.allclose(again(change, x), change(x))
    assert perfuse.counters["capture.cache_hit"] == 0


@pytest.mark.parametrize(
    "inputs",
    [
        torch.randn(5, 8),
        torch.randn(7, 5).t(),
        torch.randn(5, 7, dtype=torch.float64),
        torch.randn(5, 7, requires_grad=True),
        torch.randn(6, 7)[1:],
    ],
)
def test_other_inputs_are_not(inputs: Tensor) -> None:
    def function(x: Tensor) -> Tensor:
        return x.tanh() * 3

    again(function, torch.randn(5, 7))
    assert torch.allclose(again(function, inputs), function(inputs))
    assert perfuse.counters["capture.cache_hit"] == 0


def test_settings_and_modes_are_part_of_the_key() -> None:
    x = torch.randn(64)
    again(lambda x: torch.rand_like(x) + x, x)
    with perfuse.config.patch(fallback_random=True):
        torch.manual_seed(3)
        got = again(lambda x: torch.rand_like(x) + x, x)
    torch.manual_seed(3)
    assert torch.equal(got, torch.rand_like(x) + x)
    assert perfuse.counters["capture.cache_hit"] == 0


def test_constants_are_part_of_the_key() -> None:
    x = torch.zeros(3)
    for value in (1.0, 2.0):
        held = torch.full((3,), value)
        assert torch.equal(again(lambda x, held=held: x + held, x), held)


def test_a_wrapper_with_a_borrowed_name_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    original = F.relu

    @wraps(original)
    def relu(x: Tensor, inplace: bool = False) -> Tensor:
        return original(x) + 1

    x = torch.randn(9)
    monkeypatch.setattr(F, "relu", relu)
    again(lambda x: F.relu(x), x)
    monkeypatch.undo()
    assert torch.equal(again(lambda x: F.relu(x) + 1, x), F.relu(x) + 1)
    assert perfuse.counters["capture.cache_hit"] == 0


ALIASING: dict[str, Callable[[Tensor], Any]] = {
    "view of input": lambda x: x.view(-1),
    "input itself": lambda x: (x, x + 1),
    "two views of one": lambda x: ((y := x * 2), y.view(-1), y[0]),
    "mutation": lambda x: x.add_(1),
    "transposed result": lambda x: (x @ x.t()).t(),
    "same twice": lambda x: ((y := x.exp()), y),
    "none": lambda x: (x.exp(), None, 3),
}


@pytest.mark.parametrize("name", ALIASING)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_aliases_and_mutations(name: str, needs_grad: bool) -> None:
    """Twice: traced, then loaded where that is possible."""
    function = ALIASING[name]
    for _ in range(2):
        x = torch.arange(12.0).view(3, 4)
        mine, eager = x.clone().requires_grad_(needs_grad), x.clone().requires_grad_(needs_grad)
        got, want = again(function, mine * 1), function(eager * 1)
        for g, w in zip(*map(as_tuple, (got, want)), strict=True):
            if isinstance(w, Tensor):
                assert torch.allclose(g, w)
                assert (g.stride(), g.requires_grad) == (w.stride(), w.requires_grad)
                if w.requires_grad:
                    (mine.grad, eager.grad) = (None, None)
                    g.sum().backward(retain_graph=True)
                    w.sum().backward(retain_graph=True)
                    assert torch.allclose(mine.grad, eager.grad)
            else:
                assert g == w


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def test_results_can_be_written_to() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, (x + 1).t()

    x = torch.randn(3, 4, requires_grad=True)
    for output in again(function, x):
        output.mul_(3)
    (first, second) = again(function, x)
    (first.mul_(3).sum() + second.add_(1).sum()).backward()
    assert torch.equal(x.grad, torch.full((3, 4), 7.0))


def test_mutated_buffers_change_their_version() -> None:
    x = torch.zeros(4)

    def bump(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    for expected in (1.0, 2.0):
        version = x._version
        again(bump, x)
        assert torch.equal(x, torch.full((4,), expected))
        assert x._version > version


def test_double_backward_is_refused_clearly() -> None:
    x = torch.randn(4, requires_grad=True)
    (gradient,) = torch.autograd.grad(again(lambda x: (x**3).sum(), x), x, create_graph=True)
    assert gradient.requires_grad
    with pytest.raises(RuntimeError, match=r"differentiated again|double backward"):
        gradient.sum().backward()


@pytest.mark.parametrize("function", [torch.sin, lambda x: (x.sin(), x[1:]), lambda x: x.mul_(2)])
def test_forward_mode_is_refused_clearly(function: Callable[[Tensor], Any]) -> None:
    """Kernels compute no tangents: results without them would pass for constants."""
    compiled = torch.compile(function, backend="perfuse")
    compiled(torch.randn(4))
    with forward_ad.dual_level():
        compiled(torch.randn(4))
        with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
            compiled(forward_ad.make_dual(torch.randn(4), torch.ones(4)))


def test_second_derivatives_are_refused_for_every_leaf() -> None:
    """Those of a leaf that the forward saves nothing of are not silently None."""
    x, b = torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    w = torch.randn(3, 3)

    def function(x: Tensor, b: Tensor, w: Tensor) -> Tensor:
        return ((x + b) @ w).tanh().sum()

    result = again(function, x * 1, b, w)
    (gradient,) = torch.autograd.grad(result, x, create_graph=True)
    for leaf in (x, b):
        with pytest.raises(RuntimeError, match="differentiated again"):
            torch.autograd.grad(gradient.square().sum(), leaf, allow_unused=True, retain_graph=True)


def test_second_derivatives_are_refused_on_every_way_to_an_argument() -> None:
    """Those of an argument that was computed, and of what it was computed from; saved or not."""
    x, b = torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    w = torch.randn(3, 3)

    def function(x: Tensor, b: Tensor, w: Tensor) -> Tensor:
        return ((x + b) @ w).tanh().sum()

    middle = x * 2
    argument, other = middle.sin(), b.exp()
    (gradient,) = torch.autograd.grad(again(function, argument, other, w), x, create_graph=True)
    asked = gradient.square().sum()
    for source in (x, b, middle, argument, other):
        with pytest.raises(RuntimeError, match="differentiated again"):
            torch.autograd.grad(asked, source, allow_unused=True, retain_graph=True)


@pytest.mark.parametrize("create_graph", [False, True])
def test_batched_gradients_are_refused_clearly(create_graph: bool) -> None:
    run = torch.compile(lambda x: x.sin(), backend="perfuse")
    x = torch.ones(3, requires_grad=True)
    y = run(x)
    with pytest.raises(NotImplementedError, match="one gradient at a time"):
        torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True, create_graph=create_graph)
    (gradient,) = torch.autograd.grad(run(x), x, torch.ones(3))
    torch.testing.assert_close(gradient, x.cos())


def test_what_an_argument_was_computed_from_is_not_kept() -> None:
    """Only the way to it is: an argument that is not saved may be overwritten, and is freed."""
    x, b = torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    argument = x + b
    gone = weakref.ref(argument)
    result = again(lambda x, b: (x + b) * 3, argument, b)
    argument.mul_(2)
    del argument
    assert gone() is None
    result.sum().backward()
    assert torch.equal(x.grad, torch.full((4, 3), 3.0))


def test_hooks_on_saved_tensors_see_saved_tensors_alone() -> None:
    """Not what leads to an argument that was computed: it has no elements."""
    x, seen = torch.randn(4, 3, requires_grad=True), list[torch.Size]()

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.shape)
        return tensor + 0 * tensor.abs().max()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = again(lambda y: y.sin() * y, x + 1)
    assert seen == [x.shape]
    (gradient,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated again"):
        torch.autograd.grad(gradient.square().sum(), x, allow_unused=True)


def test_only_some_outputs_get_gradients() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.exp(), x.sin(), (x > 0).float()

    for _ in range(2):
        x = torch.linspace(-1, 1, 6, requires_grad=True)
        _, sine, sign = again(function, x)
        assert not sign.requires_grad
        sine.sum().backward()
        assert torch.allclose(x.grad, x.detach().cos())


def decayed(p: Tensor, g: Tensor, lr: float) -> Tensor:
    """One use of `lr` becomes a tensor, the other is specialised while it is traced."""
    return (p * (1 - 0.1 * lr)).add(g, alpha=-lr)


def scaled(p: Tensor, g: Tensor, lr: float) -> Tensor:
    return p * lr + g


def clamped(p: Tensor, g: Tensor, lr: float) -> Tensor:
    return (p * lr).clamp(max=lr) + g


FLOAT_RUNS = ([0.1, 0.05, 0.025], [0.9, 0.7], [0.1, 0.05, 0.025, 0.7, 0.05])


@pytest.mark.parametrize("function", [decayed, scaled, clamped])
def test_floats_are_those_of_the_call(function: Callable[..., Tensor]) -> None:
    p, g = torch.randn(6), torch.randn(6)
    for run in FLOAT_RUNS:
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="perfuse")
        for lr in run:
            assert torch.allclose(compiled(p, g, lr), function(p, g, lr)), (run, lr)


def test_a_loaded_capture_keeps_the_guards_of_its_trace() -> None:
    p, g = torch.randn(6), torch.randn(6)
    for num_hits in (0, 3):
        torch._dynamo.reset()
        perfuse.counters.clear()
        compiled = torch.compile(decayed, backend="perfuse")
        for lr in (0.1, 0.05, 0.025, 0.05):  # the last is not captured a second time
            assert torch.allclose(compiled(p, g, lr), decayed(p, g, lr))
        assert perfuse.counters["capture.cache_hit"] == num_hits
        # PyTorch 2.11 begins a trace only to find that the number must be a constant.
        assert perfuse.counters["graph.cache_miss"] == 3 - num_hits


def test_what_no_guard_asked_for_serves_every_value() -> None:
    p, g = torch.randn(6), torch.randn(6)
    for run in ((0.1, 0.05), (0.1, 0.7)):
        torch._dynamo.reset()
        compiled = torch.compile(scaled, backend="perfuse")
        for lr in run:
            assert torch.allclose(compiled(p, g, lr), scaled(p, g, lr))
    assert perfuse.counters["capture.cache_hit"] == 2


def test_exchanged_entries_are_refused() -> None:
    x = torch.rand(8)  # no sum near zero, where one rounding is a large relative error
    again(lambda x: x.sin() + 1, x), again(lambda x: x.cos() + 1, x)
    root = open_store(Context.default()).root
    assert root is not None
    entries = root.path / "entries"
    first, second = sorted(entries.glob("capture-*"))
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    assert torch.allclose(again(lambda x: x.sin() + 1, x), x.sin() + 1)
    assert torch.allclose(again(lambda x: x.cos() + 1, x), x.cos() + 1)
    assert perfuse.counters["capture.cache_hit"] == 0
    assert perfuse.counters["cache.damaged"] == 2


STATES: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "default dtype": (torch.set_default_dtype, torch.float64, torch.float32),
    "flushed denormals": (torch.set_flush_denormal, True, False),
    "deterministic": (torch.use_deterministic_algorithms, True, False),
    "matmul precision": (torch.set_float32_matmul_precision, "medium", "highest"),
    "functorch": (
        lambda v: setattr(torch._functorch.config, "fake_tensor_allow_unsafe_data_ptr_access", v),
        False,
        True,
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_the_state_of_the_process_is_part_of_the_key(name: str) -> None:
    change, value, default = STATES[name]

    def function(x: Tensor) -> Tensor:
        return x + torch.arange(4) / 3 + torch.full((4,), 1.0) * 1e-39

    x = torch.randn(4)
    again(function, x)
    change(value)
    try:
        got, want = again(function, x), function(x)
    finally:
        change(default)
    assert got.dtype == want.dtype
    assert torch.allclose(got, want)
    assert perfuse.counters["capture.cache_hit"] == 0


@pytest.mark.parametrize("is_stored", [False, True])
def test_inference_is_not_stored_where_gradients_may_be_wanted(is_stored: bool) -> None:
    x = torch.randn(4, 6, requires_grad=True)

    def constant(x: Tensor) -> Tensor:
        return x.detach() * 2 + 1

    with torch.set_grad_enabled(not is_stored):
        for _ in range(2):
            assert torch.equal(again(constant, x), constant(x))
    assert perfuse.counters.snapshot().get("capture.cache_hit", 0) == int(is_stored)
