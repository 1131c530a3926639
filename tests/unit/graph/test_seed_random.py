"""Random numbers from seeds: drawn again in the backward, the same wherever they are drawn."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perfuse.config import Settings
from perfuse.graph.facts import is_pure, is_random
from perfuse.graph.random_ops import normal_at, seeds, uniform_at
from tests.unit.graph.joint import partition_joint, run_halves, traced_joint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_and_eager_draw_the_same(dtype: torch.dtype) -> None:
    given = torch.tensor([123456789012345, -987654321])

    def draw(x: Tensor) -> Tensor:
        return uniform_at(x, 1, [37, 5], dtype) * 1.0

    torch._dynamo.reset()
    drawn = torch.compile(draw, backend="perfuse")(given)
    assert torch.equal(drawn, draw(given))
    assert drawn.min() >= 0 and drawn.max() < 1 and drawn.dtype is dtype


def test_kernels_and_eager_draw_the_same_normal_numbers() -> None:
    given = torch.tensor([123456789012345, -987654321])

    def draw(x: Tensor) -> Tensor:
        return normal_at(x, 1, [37, 5], torch.float32) * 1.0

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(draw, backend="perfuse")(given), draw(given))


def dropped(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(x @ w) * (torch.rand_like(x) > 0.5)


def test_a_mask_is_kept_as_its_seed() -> None:
    args = (torch.randn(32, 32), torch.eye(32))
    gm = traced_joint(dropped, args)
    tangent = torch.ones(32, 32)
    (result, grad_x, _), saved = run_halves(gm, args, tangent, settings=Settings())
    owned = {x.data_ptr() for x in args}
    kept = [x for x in saved if x.data_ptr() not in owned]
    assert sum(x.nbytes for x in kept) == 32 * 32 * 4 + 8
    assert torch.equal(result != 0, grad_x != 0)
    assert 0.4 < (result == 0).float().mean() < 0.6


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "features": lambda x: F.dropout1d(x, 0.4),
    "rand": lambda x: x * (torch.rand(x.shape) > 0.4),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.6)),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.6),
    "uniform_": lambda x: x * torch.empty_like(x).uniform_(-1.0, 1.0).relu(),
    "exponential_": lambda x: x * (torch.empty_like(x).exponential_(2.0) > 0.3),
}


def watched(call: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The results of a call, and what it saves for its backward."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        return call(x), kept


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", DRAWS)
def test_drawn_again_in_the_backward(name: str, dynamic: bool) -> None:
    """Eight bytes are kept, whatever the shape, and the gradient sees the forward's numbers."""
    torch._dynamo.reset()
    call = torch.compile(DRAWS[name], backend="perfuse", dynamic=dynamic)
    for shape in [(6, 20, 30), (7, 21, 33)][: 1 + dynamic]:
        x = torch.ones(shape, requires_grad=True)
        result, kept = watched(call, x)
        assert sum(t.nbytes for t in kept if t.data_ptr() != x.data_ptr()) == 8
        result.sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, result.detach())
        assert 0.2 < (result == 0).float().mean() < 0.8


@pytest.mark.parametrize("level", [1, 2])
def test_normal_numbers_are_kept_on_the_cpu_unless_memory_counts(level: int) -> None:
    args = (torch.ones(64, 64),)
    gm = traced_joint(lambda x: x * torch.randn_like(x), args)
    settings = Settings(recompute_level=level)
    (result, grad), saved = run_halves(gm, args, torch.ones(64, 64), settings=settings)
    assert sum(x.nbytes for x in saved) == (64 * 64 * 4 if level == 1 else 8)
    torch.testing.assert_close(result, grad)
    assert abs(result.mean()) < 0.1 and abs(result.std() - 1) < 0.1


def test_only_seeds_are_random() -> None:
    def draw(x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    gm = traced_joint(draw, (torch.randn(8),))
    forward, _ = partition_joint(gm, None, num_fwd_outputs=1)
    (source,) = forward.graph.find_nodes(op="call_function", target=seeds)
    (drawn,) = forward.graph.find_nodes(op="call_function", target=uniform_at)
    assert is_random(source)
    assert is_pure(drawn)
