"""The public functions: compile and its relatives, explain, aot_compile, load, lock files."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypedDict, TypeVar, Unpack, overload

import torch

from perfuse import config
from perfuse.autotune.lock import check_lock as check_lock
from perfuse.autotune.lock import write_lock as write_lock
from perfuse.candidates.sources import selected_sources
from perfuse.capture.aot import aot_compile as aot_compile
from perfuse.capture.backend import perfuse_backend
from perfuse.capture.cross_compile import codegen_for as codegen_for
from perfuse.capture.modes import overrides_of, settings_for
from perfuse.config import Settings
from perfuse.gpu import gpu_of_name
from perfuse.precision.recipe import Recipe, precision_of
from perfuse.precision.whole_model import WholeModel
from perfuse.report.explain import explain as explain
from perfuse.runtime.artefact import load as load
from perfuse.runtime.pool import release_memory as release_memory
from perfuse.target import choose_isa, machine_isas

aot_load = load

F = TypeVar("F", bound=Callable[..., Any])


class Decorator(Protocol):
    """A decorator that compiles: a module keeps its type, a function its signature."""

    def __call__(self, fn: F, /) -> F: ...


class HowToCompile(TypedDict, total=False):
    """The keyword arguments of `compile`."""

    dynamic: bool | None
    fullgraph: bool
    mode: str | None
    options: Mapping[str, Any] | None
    precision: str | Recipe | None


@overload
def compile(fn: F, **how: Unpack[HowToCompile]) -> F: ...
@overload
def compile(fn: None = None, **how: Unpack[HowToCompile]) -> Decorator: ...
def compile(
    fn: Any = None,
    *,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    precision: str | Recipe | None = None,
) -> Any:
    """Compile `fn`, a function or a module, with Perfuse; without `fn`, return a decorator.

    `dynamic` and `fullgraph` are those of `torch.compile`. `mode` names a set of settings:
    "default", "reduce-overhead", "max-autotune" or "max-autotune-no-cudagraphs". `options` are
    settings by dotted name, as in `perfuse.config`, and take precedence over the mode.
    `precision` runs every call in "bf16", "fp16", "fp8-tensor", "fp8-row", "fp8-block" or
    "fp8-delayed", or by a recipe; parameters keep their dtypes.
    """
    # Report mistakes here, not in the first call.
    _check_names(settings_for(config.snapshot(), mode, options))
    if precision is not None:
        precision_of(precision)
    if fn is None:
        how = {"dynamic": dynamic, "fullgraph": fullgraph, "mode": mode, "options": options}
        return partial(compile, **how, precision=precision)
    chosen = overrides_of(mode, options)
    compiled = torch.compile(
        fn, backend=perfuse_backend, dynamic=dynamic, fullgraph=fullgraph, options=chosen or None
    )
    return compiled if precision is None else WholeModel.of(fn, precision).applied_to(compiled)


def _check_names(settings: Settings) -> None:
    """Check the names in settings whose choice depends on the machine, or may be extended."""
    choose_isa(settings.cpu.simd, machine_isas())
    selected_sources(settings.max_autotune_gemm_backends)
    if settings.triton.arch:
        gpu_of_name(settings.triton.arch)


def memory_efficient_fusion(
    fn: F,
    *,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    memory_budget: str | int | float | None = None,
) -> F:
    """Compile the forward and backward of `fn`, a function or a module, together.

    Like `compile`, but always as one graph: values that pass between two graphs are all saved for
    the backward, within one graph only those that are more expensive to recompute than to save.
    `memory_budget` limits what a training step allocates: "14GiB", bytes, or a fraction of its
    peak without a budget.
    """
    given = {} if memory_budget is None else {"memory_budget": memory_budget}
    chosen = {**(options or {}), **given} or None
    return compile(fn, dynamic=dynamic, fullgraph=True, mode=mode, options=chosen)
