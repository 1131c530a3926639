"""Policies are data: the tables give the dtypes of PyTorch, on the CPU and on (fake) GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists

from perfuse import ConfigError
from perfuse.precision import Policy, Rule, default_policy
from perfuse.precision.casting import call_by_rule
from perfuse.precision.rules import TABLES
from perfuse.torch_compat.autocast import autocast_ops

# Those of the arguments in PyTorch's lists.
LOWER = {"cpu": (torch.bfloat16, torch.float16), "cuda": (torch.float16,)}


@contextmanager
def autocast_state(device: str, dtype: torch.dtype) -> Iterator[None]:
    """PyTorch's autocast, also for a GPU that is not there."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
        torch.clear_autocast_cache()


def functions(name: str) -> list[Callable[..., Any]]:
    """The functions and methods of this name."""
    homes = (torch, torch._C._nn, torch.linalg, torch.Tensor)
    return [getattr(home, name) for home in homes if hasattr(home, name)]


def rows_of(
    lists: Any, dtype: torch.dtype
) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Every operation of PyTorch's lists with its arguments for regions of this dtype."""
    for rows in vars(lists).values():
        for name, args, *rest in rows if isinstance(rows, list) else ():
            if rest and isinstance(rest[0], tuple):  # arguments for bfloat16, then for float16
                yield name, rest[0] if dtype == torch.float16 else args, {}
            else:
                yield name, args, rest[0] if rest and isinstance(rest[0], dict) else {}


def dtypes(result: Any) -> list[torch.dtype]:
    leaves = result if isinstance(result, list | tuple) else [result]
    return [leaf.dtype for leaf in leaves if isinstance(leaf, Tensor)]


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return dtypes(call())
    except (AssertionError, NotImplementedError):  # no fake kernel without a GPU
        return "not implemented"
    except (RuntimeError, TypeError, ValueError):
        return "refused"


def by_table(device: str, name: str, function: Any, args: Any, options: Any) -> Any:
    rule = TABLES[device].get(name.strip("_") if name.startswith("__") else name, Rule.AS_GIVEN)
    return call_by_rule(rule, device, function, args, options)


def disagreements(device: str, lists: Any) -> list[str]:
    """Operations that the table computes in other dtypes than PyTorch; the number tried is last."""
    wrong, num_tried = [], 0
    for dtype in LOWER[device]:
        for name, args, options in rows_of(lists, dtype):
            for function in functions(name):
                with autocast_state(device, dtype):
                    wanted = outcome(lambda f=function, a=args, o=options: f(*a, **o))
                    got = outcome(
                        lambda f=function, n=name, a=args, o=options: by_table(device, n, f, a, o)
                    )
                num_tried += wanted != "refused"
                if wanted != got:
                    wrong.append(f"{name} {dtype}: {got}, PyTorch: {wanted}")
    return [*wrong, str(num_tried)]


def test_cpu_table_gives_the_dtypes_of_pytorch() -> None:
    *wrong, num_tried = disagreements("cpu", AutocastCPUTestLists(torch.device("cpu")))
    assert not wrong, "\n".join(wrong)
    assert int(num_tried) > 100


@pytest.mark.filterwarnings("ignore")  # the lists call functions that are deprecated
def test_cuda_table_gives_the_dtypes_of_pytorch() -> None:
    with FakeTensorMode():
        *wrong, num_tried = disagreements("cuda", AutocastTestLists(torch.device("cuda")))
    assert not wrong, "\n".join(wrong)
    assert int(num_tried) > 100


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tables_name_the_ops_of_pytorch(device: str) -> None:
    assert autocast_ops(device) <= TABLES[device].keys()
    assert {name for name, _ in default_policy(device).rules} == autocast_ops(device)


def test_policies_are_values() -> None:
    policy = Policy.of({"softmax": "lower", "linear": Rule.FLOAT32})
    assert policy == Policy.of({"linear": "float32", "softmax": Rule.LOWER})
    assert hash(policy) == hash(Policy.of(dict(policy.rules)))
    changed = policy.with_rules({"softmax": "as_given", "my_library::my_op": "lower"})
    assert changed.rule("softmax") is Rule.AS_GIVEN
    assert changed.rule("linear") is Rule.FLOAT32
    assert policy.rule("softmax") is Rule.LOWER
    assert policy.rule("exp") is None


def test_mistakes_in_policies_are_reported() -> None:
    with pytest.raises(ConfigError, match="unknown rule 'bf16' for 'linear'"):
        Policy.of({"linear": "bf16"})
    with pytest.raises(ConfigError, match="no policy for device type 'tpu'"):
        default_policy("tpu")
