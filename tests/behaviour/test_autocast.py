"""Mixed precision: PyTorch's own tests with `perfuse.autocast`, and compiled code in regions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists

import perfuse
from perfuse import config
from perfuse.capture.dynamo_key import capture_key
from perfuse.context import Context
from perfuse.precision import Policy
from perfuse.torch_compat.registration import reset_dynamo
from tests.harness.backend import compiled
from tests.harness.compare import norm_complaints

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LISTS = AutocastCPUTestLists(torch.device("cpu"))
NN: Any = torch._C._nn


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    reset_dynamo()
    yield
    assert not torch.is_autocast_enabled("cpu")


# PyTorch's tests.


def cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(cast(item, dtype) for item in value)
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


def check_out_of_place(
    row: tuple[Any, ...], runs_as: torch.dtype, home: Any, dtype: torch.dtype, result: Any = None
) -> None:
    """An operation in a region has the expected dtype, and the value of one with cast arguments."""
    name, args, *rest = row
    options = rest[0] if rest else {}
    with perfuse.autocast("cpu", dtype):
        calls = [getattr(home, name)(*args, **options)] if hasattr(home, name) else []
        calls += [getattr(args[0], name)(*args[1:], **options)] if hasattr(Tensor, name) else []
        with perfuse.autocast("cpu", enabled=False):
            function = getattr(home, name, None) or getattr(Tensor, name)
            control = function(*cast(args, runs_as), **options)
    assert calls
    for got in calls:
        if isinstance(got, Tensor):
            assert got.dtype == (result or runs_as)
        torch.testing.assert_close(got, control, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_lists_of_operations(dtype: torch.dtype) -> None:
    for row in LISTS.torch_16:
        check_out_of_place(row, dtype, torch, dtype)
    for row in LISTS.nn_16:
        check_out_of_place(row, dtype, NN, dtype)
    for row in LISTS.torch_fp32:
        check_out_of_place(row, F32, torch, dtype)
    for row in LISTS.nn_fp32:
        check_out_of_place(row, F32, NN, dtype)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_lists_of_promotions(dtype: torch.dtype) -> None:
    place = 1 if dtype == BF16 else 2
    for row in LISTS.torch_expect_builtin_promote:
        check_out_of_place((row[0], row[place]), F32, torch, dtype, row[3])
    for row in LISTS.methods_expect_builtin_promote:
        check_out_of_place((row[0], row[place]), F32, Tensor, dtype, row[3])
    for row in LISTS.torch_need_autocast_promote:
        check_out_of_place((row[0], row[place]), F32, torch, dtype)


def test_generic_region() -> None:
    for name, args, *rest in LISTS.torch_16:
        options = rest[0] if rest else {}
        with torch.autocast("cpu"):
            wanted = getattr(torch, name)(*args, **options)
        with perfuse.autocast("cpu"):
            got = getattr(torch, name)(*args, **options)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_recurrent_network_with_low_precision_weights() -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 for this processor")
    x, state = torch.randn(1, 2, 1), (torch.randn(2, 2, 1), torch.randn(2, 2, 1))
    lstm = nn.LSTM(1, 1, 2).to(BF16)
    with pytest.raises(ValueError, match=r"input must have the type|input dtype .* does not match"):
        lstm(x, state)
    with perfuse.autocast("cpu"):
        lstm(x, state)


def test_default_dtypes() -> None:
    assert torch.get_autocast_dtype("cuda") == F16
    with perfuse.autocast("cpu"):
        assert torch.get_autocast_dtype("cpu") == BF16


# Compiled code.


class Inner(nn.Module):
    """A layer in float32 among layers in a lower precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first(x))
        with perfuse.autocast("cpu", enabled=False):
            return self.second(hidden.float())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.norm = nn.MultiheadAttention(16, 2, batch_first=True), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.heads(normed, normed, normed, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = x.new_zeros(x.shape[1], 8)
        for part in x:
            hidden, cell = self.cell(part, (hidden, cell))
        return hidden


class Inside(nn.Module):
    """A module with the region in its forward."""

    def __init__(self, inner: nn.Module, **options: Any) -> None:
        super().__init__()
        self.inner, self.options = inner, options

    def forward(self, x: Tensor) -> Tensor:
        with perfuse.autocast("cpu", **self.options):
            return self.inner(x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def convolution() -> nn.Module:
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(8, 4))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (8, 16)),
    "inner": (Inner, (8, 16)),
    "convolution": (convolution, (2, 3, 8, 8)),
    "attention": (Attention, (2, 8, 16)),
    "recurrent": (Recurrent, (3, 2, 8)),
}


def step(run: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, region: Any) -> Any:
    """The result and the gradients; the backward is outside of the region."""
    with region:
        result = run(x)
    gradients = torch.autograd.grad(result.float().square().mean(), list(module.parameters()))
    return [result.detach(), *gradients]


@pytest.mark.parametrize(
    ("name", "place"),
    [("mlp", "torch"), ("mlp", "around"), ("mlp", "inside"), ("inner", "around")]
    + [("convolution", "inside"), ("attention", "around"), ("recurrent", "inside")],
)
def test_training_step_is_as_good_as_eager(name: str, place: str) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    module, x = make(), torch.randn(shape)
    eager = step(module, module, x, torch.autocast("cpu"))
    exact = step(module, module, x, nullcontext())
    if place == "inside":
        got = step(compiled(Inside(module), fullgraph=True), module, x, nullcontext())
    else:
        region = (torch if place == "torch" else perfuse).autocast("cpu")
        got = step(compiled(module, fullgraph=True), module, x, region)
    assert not norm_complaints(got, eager, exact)


def test_an_lstm_runs_in_the_region_around_compiled_code() -> None:
    """Dynamo leaves it to PyTorch."""
    torch.manual_seed(0)
    module, x = nn.LSTM(3, 4), torch.randn(5, 2, 3)
    with torch.backends.mkldnn.flags(enabled=False):  # oneDNN's needs a processor with bfloat16
        eager = step(lambda x: module(x)[0], module, x, torch.autocast("cpu"))
        got = step(compiled(lambda x: module(x)[0]), module, x, perfuse.autocast("cpu"))
    assert all(map(torch.equal, got, eager))


@pytest.mark.parametrize("backend", ["eager", "perfuse"])
def test_dynamo_compiles_no_region(backend: str) -> None:
    """It gives up the frame, and would go on with the mode that PyTorch calls in it."""
    torch.manual_seed(0)
    module, x = nn.LSTM(3, 4), torch.randn(5, 2, 3)
    with torch.backends.mkldnn.flags(enabled=False), perfuse.autocast("cpu"):
        got = torch.compile(lambda x: module(x)[0], backend=backend)(x)
        assert torch.equal(got, module(x)[0])


def has_low_precision_lstm() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@pytest.mark.parametrize("place", ["none", "torch", "around", "inside"])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_an_lstm_is_part_of_one_graph(place: str, needs_gradient: bool) -> None:
    """Forward and backward, with the dtypes of eager, and for any length of the sequence."""
    if place != "none" and not has_low_precision_lstm():
        pytest.skip("oneDNN has no LSTM in bfloat16 for this processor")
    torch.manual_seed(0)
    module = nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True)
    x = torch.randn(2, 5, 3, requires_grad=needs_gradient)
    inner = (lambda x: module(x)[0]) if place != "inside" else Inside(lambda x: module(x)[0])
    regions = {"torch": torch.autocast("cpu"), "around": perfuse.autocast("cpu")}
    region = regions.get(place, nullcontext())
    eager = step(inner, module, x, region)
    with torch._dynamo.config.patch(allow_rnn=True):
        got = step(compiled(inner, fullgraph=True), module, x, region)
    assert got[0].dtype is eager[0].dtype
    assert all(map(torch.equal, got, eager))


def test_dropout_between_layers_of_an_lstm_is_kept() -> None:
    torch.manual_seed(0)
    module, x = nn.LSTM(3, 8, 2, dropout=0.5), torch.randn(5, 2, 3)
    with torch._dynamo.config.patch(allow_rnn=True):
        run = compiled(lambda x: module(x)[0], fullgraph=True)
        first, second = run(x), run(x)
        module.eval()
        assert torch.equal(run(x), module(x)[0])
    assert not torch.equal(first, second)


def test_disabled_region_inside_an_enabled_one_keeps_its_precision_in_backward() -> None:
    torch.manual_seed(0)
    module, x = Inner(), torch.randn(8, 16)

    def gradients(run: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        with torch.autocast("cpu"):
            loss = run(x).square().mean()
        return torch.autograd.grad(loss, list(module.second.parameters()))

    got, eager = gradients(compiled(module, fullgraph=True)), gradients(module)
    torch.testing.assert_close(got, eager, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("retains", [False, True])
def test_backward_does_not_depend_on_the_region_it_is_called_in(retains: bool) -> None:
    torch.manual_seed(0)
    w, x = nn.Parameter(torch.randn(3, 3, 3, 3)), torch.randn(2, 3, 8, 8)
    run = compiled(lambda x, w: F.conv2d(x, w).relu())
    (wanted,) = torch.autograd.grad(run(x, w).sum(), w)
    loss = run(x, w).sum()
    with perfuse.autocast("cpu"):
        (got,) = torch.autograd.grad(loss, w, create_graph=retains)
    assert torch.equal(got, wanted)


def test_casts_fuse_into_their_neighbours() -> None:
    """A norm stores the lower precision for the matmul; only the weights have kernels of casts."""
    module, x = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()), torch.randn(8, 64)

    def function(x: Tensor) -> Tensor:
        with torch.no_grad(), perfuse.autocast("cpu"):
            return module(x)

    plan = perfuse.explain(function, x).stage("plan")
    kernels = re.findall(r"^k\d+\(", plan, re.MULTILINE)
    assert len(kernels) == 4  # norm and cast, two weights, gelu


POLICY = Policy.of({"linear": "float32", "softmax": "lower", "gelu": "float32"})


@pytest.mark.parametrize("place", ["around", "inside"])
def test_policies_are_compiled(place: str) -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Softmax(-1)), torch.randn(4, 16)
    around = perfuse.autocast("cpu", policy=POLICY) if place == "around" else nullcontext()
    candidate = module if place == "around" else Inside(module, policy=POLICY)
    eager = step(candidate, module, x, around)
    exact = step(module, module, x, nullcontext())
    assert eager[0].dtype == BF16
    got = step(compiled(candidate, fullgraph=True), module, x, around)
    assert not norm_complaints(got, eager, exact)


def test_decorated_functions_are_compiled() -> None:
    @perfuse.autocast("cpu", policy={"exp": "lower"})
    def function(x: Tensor) -> Tensor:
        return (x @ x).exp()

    x = torch.eye(8)
    got = compiled(function, fullgraph=True)(x)
    assert got.dtype == BF16
    assert torch.equal(got, function(x))


class Squared(torch.autograd.Function):
    """A custom function with regions in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        with perfuse.autocast("cpu"):
            return x @ x.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with perfuse.autocast("cpu"):
            return ((gradient + gradient.t()) @ x).float()


def test_custom_functions_are_compiled_with_their_regions() -> None:
    x = torch.randn(8, 8, requires_grad=True)

    def run(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        result = function(x)
        return [result.detach(), *torch.autograd.grad(result.float().square().sum(), x)]

    def function(x: Tensor) -> Tensor:
        return Squared.apply(x)

    got, eager = run(compiled(function, fullgraph=True)), run(function)
    assert [t.dtype for t in got] == [t.dtype for t in eager] == [BF16, F32]
    torch.testing.assert_close(got, eager)


# Caches.


def test_graphs_with_regions_are_cached() -> None:
    torch.manual_seed(0)
    module, x = Inside(mlp(), policy={"gelu": "float32"}), torch.randn(8, 16)
    perfuse.counters.clear()
    results = []
    for _ in range(2):
        results.append(step(compiled(module, fullgraph=True), module, x, nullcontext()))
        reset_dynamo()
    assert all(map(torch.equal, *results))
    counters = perfuse.counters.snapshot()
    assert counters.get("capture.cache_hit", 0) >= 1, counters


def keys_of(function: Callable[[Tensor], Tensor], x: Tensor) -> list[str]:
    """The keys of the captures of one call."""
    context, keys = Context.on(torch.device("cpu"), config.snapshot()), []

    def backend(module: Any, inputs: Any) -> Any:
        keys.append(capture_key(module, inputs, context).general)
        return module.forward

    reset_dynamo()
    torch.compile(function, backend=backend, fullgraph=True)(x)
    return keys


def test_keys_contain_the_state_and_the_policy() -> None:
    """Two regions have one key only if they are one region."""
    policies = (None, {"softmax": "lower"}, {"softmax": "lower", "matmul": "float32"})
    options = [{"dtype": d, "policy": p} for d in (BF16, F16) for p in policies]
    x = torch.randn(4, 4)

    def body(x: Tensor) -> Tensor:
        return (x @ x).softmax(-1)

    def inside(**given: Any) -> Callable[[Tensor], Tensor]:
        def function(x: Tensor) -> Tensor:
            with perfuse.autocast("cpu", **given):
                return body(x)

        return function

    found = [keys_of(body, x), keys_of(inside(enabled=False), x)]
    for given in options:
        with perfuse.autocast("cpu", **given):
            found.append(keys_of(body, x))
        found.append(keys_of(inside(**given), x))
    assert found[-1] == keys_of(inside(**options[-1]), x)
    assert all(len(keys) == 1 for keys in found)
    assert len({keys[0] for keys in found}) == len(found)
