"""`perfuse.autocast` in eager code: PyTorch's state, nesting, decorators, policies, errors."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import perfuse
from perfuse.precision import Policy, Rule, default_policy

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def state() -> tuple[Any, ...]:
    """PyTorch's autocast state, and the function modes around it."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        len(torch.overrides._get_current_function_mode_stack()),
    )


def product(x: Tensor) -> Tensor:
    return x @ x


def test_a_region_sets_the_state_of_pytorch_and_restores_it() -> None:
    before = state()
    with perfuse.autocast("cpu", F16, cache_enabled=False):
        assert state()[:3] == (True, F16, False)
        with torch.autocast("cpu", BF16):
            assert state()[:2] == (True, BF16)
            with perfuse.autocast("cpu", enabled=False):
                assert state()[0] is False
            assert state()[:2] == (True, BF16)
    assert state() == before


def test_dtypes_follow_the_innermost_region_of_either_kind() -> None:
    x = torch.randn(4, 4)
    with perfuse.autocast("cpu"):
        assert product(x).dtype == BF16
        with torch.autocast("cpu", F16):
            assert product(x).dtype == F16
        with torch.autocast("cpu", enabled=False):
            assert product(x).dtype == F32
        with perfuse.autocast("cpu", F16):
            assert product(x).dtype == F16
        with perfuse.autocast("cpu", enabled=False):
            assert product(x).dtype == F32
        assert product(x).dtype == BF16
    assert product(x).dtype == F32


def test_one_region_can_be_entered_inside_of_itself() -> None:
    region, before = perfuse.autocast("cpu"), state()
    with region, region:
        with region:
            assert state()[0]
        assert state()[0]
    assert state() == before


def test_decorated_functions_may_recurse_and_raise() -> None:
    @perfuse.autocast("cpu")
    def power(x: Tensor, n: int) -> Tensor:
        """Multiply n times."""
        assert state()[0]
        return x if n == 0 else power(x, n - 1) @ x

    before = state()
    assert power.__name__ == "power" and power.__doc__ == "Multiply n times."
    assert power(torch.randn(4, 4), 3).dtype == BF16
    assert state() == before
    with pytest.raises(RuntimeError):
        power(torch.randn(4, 5), 2)
    assert state() == before


def test_a_decorator_needs_a_function() -> None:
    with pytest.raises(TypeError, match="needs a function, got int"):
        perfuse.autocast("cpu")(3)


def test_threads_have_regions_of_their_own() -> None:
    region, entered, seen = perfuse.autocast("cpu"), threading.Barrier(2), []

    def other() -> None:
        seen.append(state()[0])
        with region:
            entered.wait(10)
            entered.wait(10)
            seen.append(product(torch.randn(4, 4)).dtype)
        seen.append(state()[0])

    thread = threading.Thread(target=other)
    with region:
        thread.start()
        entered.wait(10)
    before = state()
    entered.wait(10)
    thread.join(10)
    assert seen == [False, BF16, False]
    assert state() == before


def test_errors_are_those_of_pytorch() -> None:
    device: Any = torch.device("cpu")
    with pytest.raises(ValueError, match="Expected `device_type` of type `str`, got: `<class"):
        perfuse.autocast(device)
    with pytest.raises(RuntimeError, match="Invalid device string: 'not a real device'"):
        perfuse.autocast("not a real device")
    with pytest.warns(UserWarning, match="In CPU autocast, but the target dtype is not supported"):
        region = perfuse.autocast("cpu", torch.float64)
    with region:
        assert not state()[0]


def test_disabled_region_takes_any_dtype() -> None:
    with perfuse.autocast("cpu", F32, enabled=False):
        assert product(torch.ones(2, 2)).dtype == F32


RULES = {"linear": "float32", "softmax": "lower", "layer_norm": Rule.LOWER, "add": "lower"}


def test_a_policy_overrides_the_rules_of_pytorch() -> None:
    x, w = torch.randn(4, 4), nn.Parameter(torch.randn(4, 4))
    with perfuse.autocast("cpu", policy=RULES):
        assert F.linear(x, w).dtype == F32
        assert (x @ w).dtype == BF16  # by PyTorch's rules
        assert {F.softmax(x, 0).dtype, torch.softmax(x, 0).dtype, x.softmax(0).dtype} == {BF16}
        assert F.layer_norm(x, (4,)).dtype == BF16
        assert (x + x).dtype == (1 + x).dtype == torch.add(x, x).dtype == BF16
        assert (x * x).dtype == F32
        assert F.linear(x.double(), w.double()).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert x.softmax(0).dtype == F32


def test_policies_of_nested_regions_add_up() -> None:
    x, w = torch.randn(4, 4), nn.Parameter(torch.randn(4, 4))
    with perfuse.autocast("cpu", policy=RULES):
        with perfuse.autocast("cpu", policy={"softmax": "as_given"}):
            assert x.softmax(0).dtype == F32
            assert F.linear(x, w).dtype == F32
        with perfuse.autocast("cpu"):
            assert x.softmax(0).dtype == BF16
        assert x.softmax(0).dtype == BF16


def test_a_cached_cast_is_no_argument_of_a_rule_around_it() -> None:
    """The rule of the outer region says float32: an inner one must not pass a rounded weight."""
    x, w = torch.randn(4, 4), nn.Parameter(torch.randn(4, 4))
    exact = F.linear(x, w)
    with perfuse.autocast("cpu", policy=RULES), perfuse.autocast("cpu", policy={"exp": "lower"}):
        assert torch.equal(F.linear(x, w), exact)


def test_a_whole_table_is_a_policy() -> None:
    x = torch.randn(4, 4)
    policy = default_policy("cpu").with_rules({"mm": "float32"})
    with perfuse.autocast("cpu", policy=policy):
        assert (x @ x).dtype == BF16
        assert torch.mm(x, x).dtype == F32
        assert torch.cat([x, x.bfloat16()]).dtype == F32
        assert torch.cat([x.bfloat16(), x.bfloat16()]).dtype == BF16
        assert F.mse_loss(x.bfloat16(), x.bfloat16()).dtype == F32


def test_options_of_reductions_are_set_unless_given() -> None:
    x = torch.randn(4, 4).bfloat16()
    with perfuse.autocast("cpu", policy={"softmax": "float32_result", "sum": "float32_result"}):
        assert x.softmax(0).dtype == x.sum().dtype == F32
        assert torch.softmax(x, 0, torch.float64).dtype == torch.float64
        assert x.sum(dtype=BF16).dtype == BF16


def test_refused_operations_raise() -> None:
    x = torch.rand(4)
    with (
        perfuse.autocast("cpu", policy={"binary_cross_entropy": "refused"}),
        pytest.raises(perfuse.RefusedOp, match="binary_cross_entropy is refused by the policy"),
    ):
        F.binary_cross_entropy(x, x)
    assert not state()[0]


def test_custom_operators_get_a_rule() -> None:
    with torch.library._scoped_library("perfuse_test_precision", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        twice = torch.ops.perfuse_test_precision.twice
        x = torch.randn(4)
        with perfuse.autocast("cpu", policy={"perfuse_test_precision::twice": "lower"}):
            assert twice(x).dtype == twice.default(x).dtype == BF16
        with perfuse.autocast("cpu"):
            assert twice(x).dtype == F32


def test_policy_objects_and_mappings_are_equal() -> None:
    x = torch.randn(4, 4)
    with perfuse.autocast("cpu", policy=Policy.of({"matmul": "as_given"})):
        assert product(x).dtype == F32
