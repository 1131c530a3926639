"""`perfuse.autocast`: a region of mixed precision, as a context manager or a decorator.

A region sets PyTorch's own autocast state, and PyTorch casts by its own rules. On top of that, a
function mode applies a policy to the calls it names, and replaces weights with cached casts. Where
autocast is off, inside a region or in compiled code, it does nothing.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch.overrides import TorchFunctionMode

from perfuse.precision.cast_cache import CASTS, is_cacheable
from perfuse.precision.casting import call_by_rule
from perfuse.precision.fp8_linear import allow_in_graph
from perfuse.precision.fp8_region import (
    Fp8,
    Fp8Mode,
    base_dtype,
    check_device,
    check_request,
    check_state,
    fp8_mode,
)
from perfuse.precision.policy import Policy
from perfuse.precision.rules import ALIASES, TABLES, Rule
from perfuse.torch_compat.autocast import is_enabling, is_in_backward
from perfuse.torch_compat.dynamo import left_to_python
from perfuse.torch_compat.ops import OpOverload, OpOverloadPacket

Rules = Mapping[str, Rule | str]
Function = TypeVar("Function", bound=Callable[..., Any])


class Region(Protocol):
    """A context manager and a decorator."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *raised: Any) -> bool | None: ...

    def __call__(self, function: Function, /) -> Function: ...


def autocast(
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool = True,
    policy: Policy | Rules | None = None,
    recipe: Fp8 | None = None,
) -> Region:
    """A region in which operations run in the precision given by PyTorch's rules or `policy`.

    The arguments are those of `torch.autocast`, and so are its errors and default dtypes. With
    `cache_enabled`, each weight is cast once per step, and again as soon as it changes in place.
    With `dtype=torch.float8_e4m3fn`, linear layers run in FP8 by `recipe`: "tensor", "row",
    "block", a `Recipe`, or what `perfuse.precision.prepare` returns for a model.
    """
    check_request(dtype, recipe)
    if recipe is not None:
        return _fp8_region(device_type, enabled, cache_enabled, policy, recipe)
    if torch.compiler.is_compiling():
        if policy is None:
            return torch.autocast(device_type, dtype, enabled, cache_enabled)
        return _traced_region(device_type, dtype, enabled, cache_enabled, Policy.of(policy))
    state = torch.autocast(device_type, dtype, enabled, cache_enabled)
    if policy is None:
        return DefaultRegion(state, device_type, cache_enabled)
    return PolicyRegion(state, device_type, cache_enabled, Policy.of(policy))


def _fp8_region(
    device_type: str,
    enabled: bool,
    cache_enabled: bool,
    policy: Policy | Rules | None,
    recipe: Fp8,
) -> Region:
    """A region of a recipe's dtype, with linear layers in FP8."""
    check_state(recipe)
    dtype = base_dtype(recipe)
    if torch.compiler.is_compiling():
        return _traced_region(device_type, dtype, enabled, cache_enabled, Policy.of(policy), recipe)
    if enabled:
        check_device(device_type)
    allow_in_graph()
    state = torch.autocast(device_type, dtype, enabled, cache_enabled)
    return PolicyRegion(state, device_type, cache_enabled, Policy.of(policy), recipe)


@contextmanager
def _traced_region(
    device_type: str,
    dtype: torch.dtype | None,
    enabled: bool,
    cache_enabled: bool,
    policy: Policy,
    recipe: Fp8 | None = None,
) -> Iterator[None]:
    """A region inside of compiled code: casts are recorded, and no weight is cast before."""
    state = torch.autocast(device_type, dtype, enabled, cache_enabled)
    with state, PrecisionMode(device_type, policy, caches=False):
        if recipe is None:
            yield
        else:
            with fp8_mode(device_type, recipe):
                yield


class PrecisionMode(TorchFunctionMode):
    """Runs calls by a policy, with cached casts of weights."""

    def __init__(self, device_type: str, policy: Policy, caches: bool) -> None:
        super().__init__()
        self.device_type = device_type
        self.names = policy.names
        self.caches = caches

    @left_to_python
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = {} if kwargs is None else kwargs
        name = _name_of(func)
        is_plain = name == "__get__" or options.get("out") is not None  # neither has a rule
        if is_plain or not torch.is_autocast_enabled(self.device_type):
            return func(*args, **options)
        rule = self.names.get(name)
        if rule is not None:
            return call_by_rule(rule, self.device_type, func, args, options)
        if not self.caches or torch.compiler.is_compiling():
            return func(*args, **options)
        return _call_with_casts(name, self.device_type, func, args, options)


def _name_of(func: Any) -> str:
    if isinstance(func, OpOverload):
        return str(func).rpartition(".")[0]
    if isinstance(func, OpOverloadPacket):
        return str(func)
    return str(getattr(func, "__name__", ""))


def _call_with_casts(
    name: str,
    device_type: str,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    """Call a function with cached casts in place of the weights that it would cast itself."""
    if not torch.is_autocast_cache_enabled():
        return func(*args, **options)
    dtype = torch.get_autocast_dtype(device_type)
    is_lower = TABLES.get(device_type, {}).get(ALIASES.get(name, name)) is Rule.LOWER

    def lower(value: Any) -> Any:
        return CASTS.cast(value, dtype) if is_cacheable(value, device_type) else value

    if is_lower:
        args = tuple(map(lower, args))
        options = {key: lower(value) for key, value in options.items()}
    try:
        return func(*args, **options)
    finally:
        # PyTorch keeps casts that it makes inside of a call (a recurrent network's, for all time
        # steps), and would not notice that a weight changes.
        torch.clear_autocast_cache()


class Entry(NamedTuple):
    """A region that a thread is in: its rules, and what leaving it has to undo."""

    device_type: str
    policy: Policy
    exits: ExitStack


class Entered(threading.local):
    """The regions that one thread is in, the innermost last."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def policy_for(self, device_type: str) -> Policy:
        """The rules around this point."""
        known = (e.policy for e in reversed(self.entries) if e.device_type == device_type)
        return next(known, Policy())


_ENTERED = Entered()


def _enter(
    state: torch.autocast,
    device_type: str,
    policy: Policy,
    caches: bool,
    mode: Fp8Mode | None = None,
) -> None:
    if not _ENTERED.entries:
        if is_in_backward():
            CASTS.release_after_backward()
        else:
            CASTS.release()
    inherited = _ENTERED.policy_for(device_type)
    policy = inherited.with_rules(dict(policy.rules)) if policy.rules else inherited
    exits = ExitStack()
    exits.enter_context(copy.copy(state))  # which notes the state before: one for each entry
    needs_mode = caches or bool(policy.rules)
    if needs_mode and torch.is_autocast_enabled(device_type):
        exits.enter_context(PrecisionMode(device_type, policy, caches))
    if mode is not None:
        exits.enter_context(mode)
    _ENTERED.entries.append(Entry(device_type, policy, exits))


def _leave(*raised: Any) -> None:
    _ENTERED.entries.pop().exits.__exit__(*raised)
    if not _ENTERED.entries:
        is_training = torch.is_grad_enabled() or is_in_backward()
        CASTS.release(keeps_for_backward=is_training and raised[0] is None)


class PolicyRegion(AbstractContextManager[Any]):
    """A region with a policy or a recipe. Several threads may be in it, each more than once."""

    def __init__(
        self,
        state: torch.autocast,
        device_type: str,
        caches: bool,
        policy: Policy,
        recipe: Fp8 | None = None,
    ) -> None:
        self.state, self.device_type, self.caches, self.policy = state, device_type, caches, policy
        self.recipe = recipe

    def __enter__(self) -> PolicyRegion:
        mode = None if self.recipe is None else fp8_mode(self.device_type, self.recipe)
        _enter(self.state, self.device_type, self.policy, self.caches, mode)
        return self

    def __exit__(self, *raised: Any) -> None:
        _leave(*raised)

    def __call__(self, function: Function) -> Function:
        return _decorated(function, self, self.policy, self.recipe)


class DefaultRegion(torch.autocast):
    """A region without a policy. Dynamo takes it for the `torch.autocast` that it is."""

    def __init__(self, state: torch.autocast, device_type: str, caches: bool) -> None:
        vars(self).update(vars(state))
        self.state, self.device_type, self.caches = state, device_type, caches

    def __enter__(self) -> DefaultRegion:
        _enter(self.state, self.device_type, Policy(), self.caches)
        return self

    def __exit__(self, *raised: Any) -> None:
        _leave(*raised)

    def __call__(self, function: Function) -> Function:
        return _decorated(function, self, None)


def _decorated(
    function: Function,
    region: DefaultRegion | PolicyRegion,
    policy: Policy | None,
    recipe: Fp8 | None = None,
) -> Function:
    """The function inside of the region: while it is traced, of a region made there."""
    if not callable(function):
        raise TypeError(f"a decorator needs a function, got {type(function).__name__}")
    device_type, caches = region.device_type, region.caches
    dtype, is_enabled = region.state.fast_dtype, is_enabling(region.state)
    if recipe is not None:
        dtype = torch.float8_e4m3fn

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            with autocast(device_type, dtype, is_enabled, caches, policy, recipe):
                return function(*args, **kwargs)
        with region:
            return function(*args, **kwargs)

    return cast("Function", run)
