"""Behaviours that only a device shows: streams, alignment, memory, randomness, 64-bit sizes."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import perfuse
from tests.behaviour.test_dynamic import FUNCTIONS, SIZES, concatenate
from tests.gpu.programs import norm_amax_quantise
from tests.harness.backend import Counting, compiled, eager_random
from tests.harness.compare import assert_as_good_as_eager, norm_complaints

SLEEP_CYCLES = 200_000_000  # about a tenth of a second
NUM = 200_000


@pytest.fixture(autouse=True)
def new_dynamo() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture
def cuda(device: str) -> str:
    if device != "cuda":
        pytest.skip("streams and allocators are a GPU's")
    return device


def normalise(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]).exp().sum(-1)


def check(candidate: Callable[..., Tensor], function: Callable[..., Tensor], x: Tensor) -> None:
    assert_as_good_as_eager(candidate(x), function(x), function(x.double()))


def test_runs_on_the_current_stream(cuda: str) -> None:
    candidate, x = compiled(normalise), torch.randn(64, 100, device=cuda)
    candidate(x)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        late.copy_(x)  # a kernel on another stream would read zeros
        got = candidate(late)
    stream.synchronize()
    assert_as_good_as_eager(got, normalise(x), normalise(x.double()))


def test_a_call_does_not_wait_for_the_device(cuda: str) -> None:
    candidate, x = compiled(normalise), torch.randn(64, 100, device=cuda)
    for _ in range(3):
        candidate(x)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    queued = torch.cuda.Event()
    queued.record()
    candidate(x)
    assert not queued.query(), "the call returned only after the work queued before it"


def biased(x: Tensor) -> Tensor:
    """Buckets of distances as T5 and MPNet have them: computed on the CPU, then moved."""
    distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    near = distance.abs() < 8
    far = 8 + (torch.log(distance.abs().float() / 8) * 4).clamp(0, 7).long()
    return x[:, torch.where(near, distance.abs(), far).to(x.device)].sum(-1)


def test_constants_computed_on_the_cpu_are_moved_once(cuda: str) -> None:
    candidate, x = compiled(biased), torch.randn(40, 64, device=cuda)
    assert_as_good_as_eager(candidate(x), biased(x), biased(x.double()))
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    queued = torch.cuda.Event()
    queued.record()
    candidate(x)
    assert not queued.query(), "the call waited for a copy of what does not change"


class Images(nn.Module):
    """Plain, depthwise and grouped convolutions with biases, norms and pooling."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.planes = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.middle = nn.Conv2d(16, 32, 3, padding=1, groups=groups, bias=False)
        self.last = nn.Conv2d(32, 16, 1)
        self.norm = nn.BatchNorm2d(32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = F.silu(self.planes(F.relu(self.stem(x))))
        y = F.max_pool2d(self.norm(self.middle(y)), 3, 2, 1)
        z = self.last(y) * y.mean((2, 3), keepdim=True)[:, :16].sigmoid()
        return z, y.flatten(1), F.adaptive_avg_pool2d(z, 1).flatten(1)


@pytest.mark.parametrize("is_training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("groups", [1, 4])
def test_layouts_of_convolutions_stay_inside(groups: int, is_training: bool, cuda: str) -> None:
    model = Images(groups).to(cuda, torch.bfloat16).train(is_training)
    x = torch.randn(4, 3, 20, 18, device=cuda, dtype=torch.bfloat16)
    wide = copy.deepcopy(model).float()
    results = []
    for run, given in ((compiled(model), x), (model, x), (wide, x.float())):
        source = wide if given.dtype == torch.float32 else model
        source.zero_grad()
        with torch.set_grad_enabled(is_training):
            outputs = run(given)
        if is_training:
            sum(o.float().square().mean() for o in outputs).backward()
        gradients = [p.grad for p in source.parameters() if p.grad is not None]
        results.append([t.detach().clone() for t in (*outputs, *gradients)])
    got, eager, exact = results
    assert [t.stride() for t in got[:3]] == [t.stride() for t in eager[:3]]
    assert not norm_complaints(got, eager, exact)


def test_threads_with_streams_of_their_own(cuda: str) -> None:
    # `dynamic=False` would switch a setting of all threads at every call, each its own way.
    candidate = compiled(normalise, dynamic=None)
    inputs = [torch.randn(64, 100, device=cuda) * (i + 1) for i in range(4)]
    candidate(inputs[0])
    results: dict[int, Tensor] = {}

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                results[i] = candidate(inputs[i])
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, x in enumerate(inputs):
        assert_as_good_as_eager(results[i], normalise(x), normalise(x.double()))


def test_a_user_can_capture_a_graph_of_it(cuda: str) -> None:
    candidate, x = compiled(normalise), torch.randn(64, 100, device=cuda)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            candidate(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = candidate(x)
    x.normal_()
    graph.replay()
    assert_as_good_as_eager(got, normalise(x), normalise(x.double()))


def test_the_other_device(cuda: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x = torch.randn(64, 100, device="cuda:1")
    with torch.cuda.device(0):
        check(compiled(normalise), normalise, x)
        check(compiled(normalise), normalise, x.to("cuda:0"))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.uint8))
@pytest.mark.parametrize("first", (0, 1), ids=("aligned_first", "misaligned_first"))
def test_alignment_changes_between_calls(device: str, dtype: torch.dtype, first: int) -> None:
    base = torch.randint(0, 99, (4099,), device=device).to(dtype)
    candidate = compiled(lambda x: x * 2 + 1)
    for offset in (first, 1 - first, 3, 0):
        x = base[offset : offset + 4096]
        assert torch.equal(candidate(x), x * 2 + 1)


def test_misaligned_parameters_of_a_norm(device: str) -> None:
    x = torch.randn(33 * 128 + 1, device=device)[1:].view(33, 128)
    weight = torch.randn(131, device=device)[3:]

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight)

    got = compiled(function)(x, weight)
    assert_as_good_as_eager(got, function(x, weight), function(x.double(), weight.double()))


@pytest.mark.parametrize("dynamic", (True, None), ids=("dynamic", "automatic"))
@pytest.mark.parametrize("function", [f for f in FUNCTIONS if f.__name__ != "sizes_as_numbers"])
def test_ten_sizes_one_compile(
    function: Callable[[Tensor], Tensor], dynamic: bool | None, device: str
) -> None:
    counting = Counting()
    candidate = torch.compile(function, backend=counting, dynamic=dynamic)
    for size in SIZES:
        check(candidate, function, torch.randn(size, 6, device=device))
    assert counting.num_graphs == (1 if dynamic else 2)


def test_zero_and_one_after_a_dynamic_compile(device: str) -> None:
    candidate = torch.compile(concatenate, backend=Counting(), dynamic=True)
    for size in (4, 1, 0, 7):
        check(candidate, concatenate, torch.randn(size, 3, device=device))


@pytest.mark.parametrize("rows", (1, 7, 2048), ids=str)
@pytest.mark.parametrize("columns", (15, 512, 4096), ids=str)
def test_norm_amax_quantise_of_every_shape(device: str, rows: int, columns: int) -> None:
    x = torch.randn(2, rows, columns, device=device).half()
    scale = torch.tensor(0.5, device=device)

    def function(x: Tensor, buffer: Tensor) -> Tensor:
        return norm_amax_quantise(x, scale, buffer, dtype=torch.float8_e4m3fn)

    mine, theirs = torch.zeros(1, device=device).half(), torch.zeros(1, device=device).half()
    exact = torch.zeros(1, device=device, dtype=torch.float64)
    candidate = compiled(function)
    for _ in range(2):  # the second call must not see the amax of the first
        got, eager = candidate(x, mine), function(x, theirs)
        wide = function(x.double(), exact)
        assert_as_good_as_eager((got, mine), (eager, theirs), (wide, exact))
        x = x * 0.25 + 3


def test_memory_comes_back(cuda: str) -> None:
    candidate = compiled(lambda x: (x.softmax(-1) @ x.t()).relu())
    x = torch.randn(512, 512, device=cuda)
    candidate(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        candidate(x)
    assert torch.cuda.memory_allocated() == before


def test_results_survive_the_next_call(device: str) -> None:
    candidate = compiled(normalise)
    x = torch.randn(64, 100, device=device)
    first = candidate(x)
    kept = first.clone()
    candidate(x + 1)
    assert torch.equal(first, kept)


def test_scalars_on_the_cpu(device: str) -> None:
    x, s = torch.randn(99, device=device), torch.tensor(1.5)
    got = compiled(lambda x, s: x * s + 1)(x, s)
    assert_as_good_as_eager(got, x * s + 1, x.double() * s + 1)


def test_two_devices_in_one_graph(device: str) -> None:
    x, y = torch.randn(99, device=device), torch.randn(99)

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp() + y.tanh().to(x.device), x.sin().cpu() * y

    got = compiled(function)(x, y)
    assert_as_good_as_eager(got, function(x, y), function(x.double(), y.double()))


@pytest.mark.parametrize("mode", ("reduce-overhead", "max-autotune"))
def test_modes(device: str, mode: str) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.gelu(normalise(x)[:, None] * w) @ w.t()

    candidate = torch.compile(function, backend=Counting().inner, mode=mode)
    w = torch.randn(64, 32, device=device)
    for i in range(5):
        x = torch.randn(64, 100, device=device) * (i + 1)
        got = candidate(x, w).clone()
        assert_as_good_as_eager(got, function(x, w), function(x.double(), w.double()))


def test_autocast_training_step(device: str) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128)).to(device)
    x = torch.randn(33, 64, device=device)

    def step(run: Callable[[Tensor], Tensor], dtype: torch.dtype | None) -> list[Tensor]:
        with torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None):
            output = run(x)
        gradients = torch.autograd.grad(output.float().square().mean(), list(layer.parameters()))
        return [output.detach(), *gradients]

    eager, exact = step(layer, torch.bfloat16), step(layer, None)
    assert not norm_complaints(step(compiled(layer), torch.bfloat16), eager, exact)


def test_channels_last_convolution_trains(device: str) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).to(device)
    x = torch.randn(4, 3, 16, 16, device=device).to(memory_format=torch.channels_last)
    wide = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).to(device).double()
    wide.load_state_dict(layer.state_dict())

    def step(run: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
        output = run(x)
        return [output.detach(), *torch.autograd.grad(output.sum(), list(module.parameters()))]

    exact = step(wide, wide, x.double())
    # Norms: the gradient of a bias under a batch norm is zero but for rounding.
    assert not norm_complaints(step(compiled(layer), layer, x), step(layer, layer, x), exact)


def test_a_large_result_with_unaligned_rows_is_held_once(cuda: str) -> None:
    x = torch.randn(2048, 512, device=cuda, dtype=torch.bfloat16)
    w = torch.randn(32769, 512, device=cuda, dtype=torch.bfloat16)
    candidate = compiled(F.linear)
    got, eager = candidate(x, w), F.linear(x, w)
    assert got.stride() == eager.stride()
    assert_as_good_as_eager(got, eager, x.double() @ w.double().t())
    size = got.numel() * got.element_size()
    del got, eager
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    candidate(x, w)
    assert torch.cuda.max_memory_allocated() - before < 1.01 * size


def test_more_than_32_bits_of_elements(cuda: str) -> None:
    rows, columns = 3, (1 << 31) // 2
    x = torch.ones(rows, columns, dtype=torch.uint8, device=cuda)
    x[-1, -1] = 9
    got, sums = compiled(lambda x: (x + 1, x.sum(1)))(x)
    assert int(got[-1, -1]) == 10 and int(got[0, 0]) == 2 and int(got.amin()) == 2
    assert sums.tolist() == [columns, columns, columns + 8]


def dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.3)


@pytest.mark.parametrize(
    ("draw", "mean", "variance"),
    (
        (torch.rand_like, 0.5, 1 / 12),
        (torch.randn_like, 0.0, 1.0),
        (lambda x: dropout(x + 1), 1.0, 0.3 / 0.7),
    ),
    ids=("rand", "randn", "dropout"),
)
def test_distribution(
    draw: Callable[[Tensor], Tensor], mean: float, variance: float, device: str
) -> None:
    drawn = compiled(draw)(torch.zeros(NUM, device=device)).double().cpu()
    # Five standard errors; the variance of a variance is at most that of a normal, 2 v^2 / n.
    assert abs(drawn.mean() - mean) < 5 * (variance / NUM) ** 0.5
    assert abs(drawn.var() - variance) < 5 * variance * (2 / NUM) ** 0.5


def test_a_seed_repeats_and_calls_differ(device: str) -> None:
    candidate, x = compiled(dropout), torch.ones(1000, device=device)
    torch.manual_seed(3)
    first, second = candidate(x), candidate(x)
    torch.manual_seed(3)
    again = candidate(x)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_backward_uses_the_mask_of_forward(device: str) -> None:
    x = torch.ones(4096, device=device, requires_grad=True)
    y = compiled(lambda t: dropout(t.exp()))(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient == 0, y == 0)
    assert 0.2 < float((y == 0).float().mean()) < 0.4


def test_bit_equal_to_eager_with_fallback_random(device: str) -> None:
    x = torch.linspace(-2, 2, 501, device=device)
    torch.manual_seed(11)
    eager = [dropout(x), dropout(x)]
    torch.manual_seed(11)
    with eager_random():
        candidate = compiled(dropout)
        got = [candidate(x), candidate(x)]
    assert all(torch.equal(a, b) for a, b in zip(got, eager, strict=True))


def test_indices_at_the_edges(device: str) -> None:
    weight = torch.randn(50, 8, device=device)
    index = torch.tensor([0, 49, -1, -50], device=device)
    got = compiled(lambda w, i: w[i])(weight, index)
    assert torch.equal(got, weight[index])


def test_host_time_of_a_call_does_not_grow(cuda: str) -> None:
    """A leak in the launcher (tables, events, frames) shows as calls that get slower."""
    candidate, x = compiled(normalise), torch.randn(8, 8, device=cuda)

    def batch() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(500):
            candidate(x)
        return time.perf_counter() - began

    batch()
    early = min(batch() for _ in range(3))
    for _ in range(5):
        batch()
    assert min(batch() for _ in range(3)) < 2 * early


@pytest.mark.parametrize("is_training", [False, True], ids=["inference", "training"])
def test_artefacts_take_any_size(device: str, tmp_path: Path, is_training: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16)).to(device)
    example = torch.randn(8, 8, device=device, requires_grad=is_training)
    options: dict[str, Any] = {"dynamic": True, "training": is_training}
    loaded = perfuse.load(perfuse.aot_compile(model, (example,), tmp_path / "a", **options))
    for n in (2, 5, 300):
        x = torch.randn(n, 8, device=device, requires_grad=is_training)
        got, want = loaded(x), model(x)
        torch.testing.assert_close(got, want.detach(), check_device=True)
        if is_training:
            weights = torch.randn_like(want)
            grads = [torch.autograd.grad((y * weights).sum(), x)[0] for y in (got, want)]
            torch.testing.assert_close(grads[0], grads[1], atol=1e-5, rtol=1e-4)
