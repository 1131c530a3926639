"""Random numbers from seeds: drawn again in the backward, the same wherever they are drawn."""

import pytest
import torch
from torch import Tensor

from perfuse.config import Settings
from perfuse.graph.facts import is_pure, is_random
from perfuse.graph.partition import partition_joint
from perfuse.graph.random_ops import seeds, uniform_at
from tests.unit.graph.joint import run_halves, traced_joint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_and_eager_draw_the_same(dtype: torch.dtype) -> None:
    given = torch.tensor([123456789012345, -987654321])

    def draw(x: Tensor) -> Tensor:
        return uniform_at(x, 1, [37, 5], dtype) * 1.0

    torch._dynamo.reset()
    drawn = torch.compile(draw, backend="perfuse")(given)
    assert torch.equal(drawn, draw(given))
    assert drawn.min() >= 0 and drawn.max() < 1 and drawn.dtype is dtype


def dropped(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(x @ w) * (torch.rand_like(x) > 0.5)


@pytest.mark.parametrize(("level", "mask_bytes"), [(1, 32 * 32), (2, 8)])
def test_a_mask_is_kept_as_bytes_or_as_its_seed(level: int, mask_bytes: int) -> None:
    args = (torch.randn(32, 32), torch.eye(32))
    gm = traced_joint(dropped, args)
    tangent = torch.ones(32, 32)
    settings = Settings(recompute_level=level)
    (result, grad_x, _), saved = run_halves(gm, args, tangent, settings=settings)
    owned = {x.data_ptr() for x in args}
    kept = [x for x in saved if x.data_ptr() not in owned]
    assert sum(x.nbytes for x in kept) == 32 * 32 * 4 + mask_bytes
    assert torch.equal(result != 0, grad_x != 0)
    assert 0.4 < (result == 0).float().mean() < 0.6


def test_only_seeds_are_random() -> None:
    def draw(x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    gm = traced_joint(draw, (torch.randn(8),))
    forward, _ = partition_joint(gm, None, num_fwd_outputs=1)
    (source,) = forward.graph.find_nodes(op="call_function", target=seeds)
    (drawn,) = forward.graph.find_nodes(op="call_function", target=uniform_at)
    assert is_random(source)
    assert is_pure(drawn)
