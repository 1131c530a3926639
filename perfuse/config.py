"""The settings: one frozen, typed and documented tree, and this module is its live view.

`perfuse.config.cpu.simd` reads, `perfuse.config.verify = True` sets for the process, and
`perfuse.config.patch(...)` sets for a block or a function. A compile takes one `snapshot()` at its
start and passes it down, so nothing below reads this module. `environment.py` has the variables
that change the defaults.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from types import ModuleType, NoneType
from typing import Any, Literal, ParamSpec, TypeVar, get_args

from perfuse.environment import LOG_VARIABLE, variables
from perfuse.errors import ConfigError, ConfigWarning, UnknownOption
from perfuse.forking import ForkLock
from perfuse.setting import Option, SettingRow, is_valid, key, kind_name, leaves, plain
from perfuse.sizes import parse_budget

P = ParamSpec("P")
R = TypeVar("R")

MIB = 1 << 20
ENV_PREFIX = "PERFUSE_"
AS_MAPPING = 'name settings with their values, such as {"cpu.simd": "avx2"}.'
# Variables of other tools that set a setting; if two set the same one, the last counts.
COMMON_VARIABLES = {"CXX": "cpu.compiler", "ROCM_PATH": "rocm.home", "ROCM_HOME": "rocm.home"}


@dataclass(frozen=True, slots=True)
class CpuSettings:
    """How CPU kernels are generated and run."""

    simd: Literal["auto", "avx512", "avx2", "neon", "scalar"] = key(
        "auto", "Vector instructions to generate; auto: the widest that this CPU supports."
    )
    threads: int = plain(0, "Threads that a kernel may use; 0: torch.get_num_threads().")
    compiler: str = key("", "The C++ compiler; empty: $CXX, else g++, else clang++.")
    opt_level: int = key(3, "The compiler's optimisation level, 0 to 3.")
    stream_store_bytes: int | None = key(
        None,
        "Outputs of at least this size use non-temporal stores; None: those that would be "
        "evicted from the last-level cache before they are read; 0: never.",
    )
    grain_elements: int = key(32768, "Kernels with fewer elements run on one thread.")
    tune_matmuls: bool = key(
        True,
        "Race the libraries for each large matmul and keep the fastest; use templates that are "
        "known to win on this CPU.",
    )
    attention: Literal["auto", "kernel", "library"] = key(
        "auto",
        "How scaled_dot_product_attention is computed: by a generated kernel where it is "
        "supported, by PyTorch's library, or (auto) by whichever measured faster for such sizes.",
    )
    pool_limit_bytes: int = plain(
        1024 * MIB,
        "Maximum size of the pool of large buffers, in use or free; 0 disables the pool.",
    )


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Where built code is cached between processes."""

    dir: str = plain("", "Folder of the cache; empty: $XDG_CACHE_HOME/perfuse or ~/.cache/perfuse.")
    enabled: bool = plain(True, "Keep built code on disk and reuse it.")
    max_bytes: int = plain(
        4096 * MIB,
        "Size above which the least recently used entries are removed, except those used in the "
        "last ten minutes.",
    )


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """How the C++ compiler is run."""

    jobs: int = plain(0, "Compiler processes run in parallel; 0: the number of cores.")
    timeout_s: int = plain(300, "Seconds after which a compiler run is aborted.")


@dataclass(frozen=True, slots=True)
class TritonSettings:
    """Triton kernels."""

    arch: str = key("", "GPU to generate code for (sm_90, gfx942, ...); empty: the one present.")


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """How GPU programs are generated and run."""

    interpret: bool = key(
        False, "Compile CPU tensors as if they were on a GPU, and run them in Triton's interpreter."
    )
    approximate: bool = key(
        False, "Approximate division and exponentials in float32 too, not only in half precision."
    )
    known_templates: bool = key(
        True, "Compute matmuls by templates that are known to beat the library on this GPU."
    )
    max_cuda_graphs: int = plain(
        16, "Maximum number of CUDA graphs that a program records, one for each set of sizes."
    )


@dataclass(frozen=True, slots=True)
class RocmSettings:
    """Composable Kernel (CK), a source of matmul candidates on AMD GPUs."""

    ck_dir: str = key("", "Folder of Composable Kernel; empty: the one in rocm.home.")
    home: str = key("", "Folder of ROCm; empty: $ROCM_HOME, $ROCM_PATH, else /opt/rocm.")
    compiler: str = key("", "Compiler for CK; empty: hipcc, or clang of rocm.home.")
    arch: str = key("", "GPU that CK is compiled for (gfx942, ...); empty: the target's.")
    use_preselected_instances: bool = key(
        False, "Consider only the few instances of CK that are known to do well for float16."
    )
    n_max_profiling_configs: int = key(
        16, "How many CK instances are compiled and measured for a matmul; 0: all legal ones."
    )
    compile_bytes: int = plain(
        16 * 1024 * MIB, "Address space that one compiler run for CK may use; 0: no limit."
    )


@dataclass(frozen=True, slots=True)
class ThresholdSettings:
    """Sizes at which a decision changes; tests set them all to 0."""

    pool_bytes: int = key(1 << 18, "CPU tensors of at least this size come from the pool.")
    huge_page_bytes: int = plain(
        2 * MIB, "Pooled memory of at least this size asks for huge pages."
    )
    forget_bytes: int = key(
        1 << 14, "Saved tensors of at least this size are freed after their last use."
    )
    gpu_arena_tensor_bytes: int = key(1 << 16, "GPU temporaries below this size share an arena.")
    gpu_scratch_bytes: int = key(1 << 18, "GPU scratch up to this size persists between calls.")
    gpu_release_bytes: int = key(
        16 * MIB, "Dead GPU memory of at least this size is freed immediately."
    )
    many_inputs: int = key(64, "Programs with this many inputs read all addresses in one call.")
    tuned_matmul_work: int = key(1 << 22, "CPU matmuls of this many multiplications are raced.")
    tuned_tile_bytes: int = key(
        4 * MIB, "GPU kernels that move at least this many bytes are raced by max_autotune."
    )
    gpu_loop_matmul_work: int = key(
        1 << 15, "GPU matmuls of at most this many multiplications become loops."
    )
    padded_matmul_work: int = key(
        1 << 30, "GPU matmuls of this many multiplications are padded to aligned rows."
    )
    filled_matmul_elements: int = key(
        1 << 23, "Results with eight times this many elements are filled by aligned matmuls."
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings at one moment, passed through a compile from its first stage to its last."""

    fallback_random: bool = key(
        False, "Draw random numbers with eager PyTorch, so that a seed gives the same numbers."
    )
    fp8_cross_cast: bool = key(
        False, "Convert between float8_e4m3fn and float8_e5m2, through float32; otherwise refuse."
    )
    freeze: bool = key(
        False,
        "In inference, compute values that depend only on parameters and buffers once, and again "
        "when these change: fold batch norms into convolutions, pack and cast weights.",
    )
    on_error: Literal["raise", "eager"] = plain(
        "raise", "When a compile fails: raise the error, or warn and run eagerly."
    )
    verify: bool | Literal["memory"] = key(
        False,
        'Check the artefact of every stage against its spec; "memory" also poisons memory before '
        "it is written and checks the bytes around every buffer while programs run.",
        part=lambda value: value == "memory",
    )
    pause_gc: bool = plain(
        True, "Pause garbage collection while functions are captured and compiled."
    )
    max_autotune: bool = key(
        False, "Race candidates for matmuls, and tiles of large GPU kernels; keep the fastest."
    )
    max_autotune_gemm: bool = key(False, "Race candidates for matmuls only.")
    max_autotune_gemm_backends: str = key(
        "ATEN,TRITON,CPP", "Sources of candidates for matmuls, separated by commas, in any case."
    )
    autotune_fallback_to_aten: bool = key(
        True, "If no candidate for a matmul is valid, use ATen instead of raising an error."
    )
    benchmark_epilogue_fusion: bool = key(
        True, "Choose the template of a matmul by its time with the loops fused into it."
    )
    max_fusion_size: int = key(0, "Maximum number of loops in one kernel; 0: no limit.")
    autotune_in_subproc: bool = plain(False, "Run candidates in worker processes.")
    autotune_multi_device: bool = plain(False, "Use one worker per visible GPU.")
    tune_seconds: int = plain(60, "Seconds of tuning for one graph; 0: no limit.")
    tune_timeout_s: int = plain(60, "Seconds after which a candidate in a worker is killed.")
    tune_worker_bytes: int = plain(
        0, "Memory that a worker may allocate; 0: three quarters of the machine's."
    )
    compile_threads: int = plain(0, "Threads that compile candidates; 0: build.jobs.")
    benchmark_kernel: bool = plain(
        False, "Run each kernel alone on random data, and log its time (log channel `tuning`)."
    )
    autotune_local_cache: bool = plain(True, "Remember measured choices in the cache on disk.")
    autotune_remote_cache: bool = key(
        False,
        "Share measured choices with other machines through the server at redis_url; default "
        "mode then measures tiles of GPU kernels too, for at most one second.",
    )
    redis_url: str = plain(
        "", "Server of the remote cache: redis://[user:password@]host[:port][/database], rediss://."
    )
    search_autotune_cache: bool = key(
        False, "Without max_autotune, use remembered choices and measure nothing."
    )
    # Its content is part of keys, not its path (cache/keys.py, identity).
    lock_file: str = plain("", "File of pinned choices, see `perfuse lock`; empty: none.")
    cudagraphs: bool = plain(False, "Replay launches on CUDA devices through CUDA graphs.")
    recompute_level: int = key(
        1,
        "What the backward recomputes instead of saving: 0 only views, 1 also what fuses into a "
        "loop, 2 also reductions and gathers, 3 also matmuls and attention.",
    )
    logits_chunk_bytes: int | None = key(
        None,
        "Compute losses over a vocabulary in chunks of logits of this size, if they fill at least "
        "four; None: 64 MiB on a CPU, or more for efficient matmuls, and never on a GPU; 0: never.",
    )
    memory_budget: str | int | float | None = key(
        None,
        "Limit on what a training step allocates besides its inputs and parameters: bytes "
        '("14GiB", "300MB", 300_000_000) or a fraction of its peak without a budget (0.5).',
    )
    over_budget: Literal["warn", "raise"] = plain(
        "warn", "When memory_budget cannot be met: warn and run with the lowest peak, or raise."
    )
    cpu: CpuSettings = field(default_factory=CpuSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    build: BuildSettings = field(default_factory=BuildSettings)
    triton: TritonSettings = field(default_factory=TritonSettings)
    gpu: GpuSettings = field(default_factory=GpuSettings)
    rocm: RocmSettings = field(default_factory=RocmSettings)
    thresholds: ThresholdSettings = field(default_factory=ThresholdSettings)

    def with_overrides(self, overrides: Mapping[str, Any]) -> Settings:
        """Return these settings with some changed, by dotted name or by nested mapping."""
        return _apply(self, _checked(overrides))

    def cache_key(self) -> str:
        """The settings that change the generated code, as text for hashing."""
        parts = ((name, option.part) for name, option in _options().items())
        return ",".join(f"{name}={part(self.get(name))!r}" for name, part in parts if part)

    @property
    def guards_memory(self) -> bool:
        """Whether programs check their memory while they run, which changes their code."""
        return self.verify == "memory"

    def get(self, name: str) -> Any:
        """The value of one setting by its dotted name."""
        if name not in _options():
            raise UnknownOption(name, _options())
        value: Any = self
        for part in name.split("."):
            value = getattr(value, part)
        return value


@functools.cache
def _options() -> dict[str, Option]:
    return dict(leaves(Settings))


@functools.cache
def _groups() -> frozenset[str]:
    return frozenset(name.split(".")[0] for name in _options() if "." in name)


def _check(name: str, value: Any) -> None:
    option = _options().get(name)
    if option is None:
        raise UnknownOption(name, [*_options(), *_groups()])
    if not is_valid(option.kind, value):
        kind = kind_name(option.kind)
        raise ConfigError(
            f"setting {name!r} cannot be {value!r}",
            hint=f"expected {kind}{', 0 or more' if 'int' in kind else ''}: {option.sentence}",
        )
    if name in ("cpu.opt_level", "recompute_level") and value > 3:
        raise ConfigError(f"setting {name!r} cannot be {value!r}", hint=option.sentence)
    if name == "memory_budget" and value is not None:
        try:
            parse_budget(value)
        except ValueError as error:
            message = f"setting {name!r} cannot be {value!r}: {error}"
            raise ConfigError(message, hint=option.sentence) from None


def _flatten(overrides: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in overrides.items():
        if not isinstance(name, str):
            raise ConfigError(f"setting names must be strings, got {name!r}")
        if not prefix and name in _groups():
            if is_dataclass(value):
                value = {leaf.name: getattr(value, leaf.name) for leaf in fields(value)}
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name!r} is a group of settings: assign a mapping to it")
            yield from _flatten(value, f"{name}.")
        else:
            yield prefix + name, value


def _checked(overrides: Mapping[str, Any]) -> dict[str, Any]:
    flat = dict(_flatten(overrides))
    for name, value in flat.items():
        _check(name, value)
    return flat


def _apply(settings: Settings, flat: Mapping[str, Any]) -> Settings:
    top: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        head, _, leaf = name.partition(".")
        if leaf:
            nested.setdefault(head, {})[leaf] = value
        else:
            top[head] = value
    for head, changes in nested.items():
        top[head] = replace(getattr(settings, head), **changes)
    return replace(settings, **top) if top else settings


def _parse(name: str, variable: str, text: str) -> Any:
    value = _value_of(_options()[name].kind, text)
    try:
        _check(name, value)
    except ConfigError as error:
        raise ConfigError(error.message, at=f"${variable}", hint=error.hint) from None
    return value


def _value_of(kind: Any, text: str) -> Any:
    """Read a variable: a bool, a number or None where the setting takes one, else the text."""
    word = text.strip().lower()
    yes, no = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
    if (kind is bool or bool in get_args(kind)) and word in (*yes, *no):
        return word in yes
    if NoneType in get_args(kind) and word in ("", "none"):
        return None
    if (kind is int or int in get_args(kind)) and word.isdecimal():
        return int(word)
    return text


def from_environment(environment: Mapping[str, str]) -> Settings:
    """The defaults, overridden by PERFUSE_* variables and by those that compilers know."""
    names = _variables()
    overrides: dict[str, Any] = {}
    for variable, name in COMMON_VARIABLES.items():
        if environment.get(variable):
            overrides[name] = environment[variable]
    for variable, nearest in unknown_variables(environment).items():
        # Not an error: another tool may own a variable with this prefix.
        hint = f"did you mean {nearest}? " if nearest else ""
        message = f"${variable} is not a Perfuse setting and is ignored; {hint}"
        warnings.warn(f"{message}`perfuse config` lists the settings", ConfigWarning, stacklevel=2)
    for variable in sorted(names.keys() & environment.keys()):
        name = names[variable]
        overrides[name] = _parse(name, variable, environment[variable])
    return Settings().with_overrides(overrides)


def _variables() -> dict[str, str]:
    return {ENV_PREFIX + name.upper().replace(".", "_"): name for name in _options()}


def unknown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with the prefix of settings that name none, each with the nearest name, or ""."""
    known = [*_variables(), LOG_VARIABLE]
    unknown = sorted(v for v in environment if v.startswith(ENV_PREFIX) and v not in known)
    return {v: next(iter(get_close_matches(v, known, n=1, cutoff=0.5)), "") for v in unknown}


# The settings of the process, and above them what `patch` changed in this thread or task.
_lock = ForkLock()
_process: list[Settings] = []
_watchers: list[Callable[[Settings], None]] = []
_patches: ContextVar[dict[str, Any] | None] = ContextVar("perfuse_config_patches", default=None)


def _process_settings() -> Settings:
    with _lock:
        if not _process:
            _process.append(from_environment(variables()))
        return _process[0]


def snapshot() -> Settings:
    """The current settings in this context: frozen, to be passed down."""
    patches = _patches.get()
    return _apply(_process_settings(), patches) if patches else _process_settings()


def assign(name: str, value: Any) -> None:
    """Set one setting or group: inside a `patch` until it ends, else for the whole process."""
    flat = _checked({name: value})
    patches = _patches.get()
    if patches is not None:
        _patches.set({**patches, **flat})
        return
    with _lock:
        _process[:] = [_apply(_process_settings(), flat)]
    for watcher in _watchers:
        watcher(_process_settings())


def watch(watcher: Callable[[Settings], None]) -> None:
    """Call `watcher` whenever the settings of the process change."""
    _watchers.append(watcher)


class patch:  # noqa: N801 - reads as a function: `with config.patch(...)`, `@config.patch(...)`
    """Change settings for a block or for each call of a function, in this thread or task only."""

    def __init__(self, overrides: Mapping[str, Any] | None = None, /, **by_name: Any) -> None:
        if not isinstance(overrides or {}, Mapping):
            raise ConfigError(f"settings must be a mapping, got {overrides!r}", hint=AS_MAPPING)
        self._overrides = _checked({**(overrides or {}), **by_name})
        self._tokens: list[Token[dict[str, Any] | None]] = []

    def __enter__(self) -> Settings:
        self._tokens.append(_patches.set({**(_patches.get() or {}), **self._overrides}))
        return snapshot()

    def __exit__(self, *raised: object) -> None:
        _patches.reset(self._tokens.pop())

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if isinstance(function, type) or inspect.isgeneratorfunction(function):
            raise ConfigError(
                f"config.patch cannot decorate {function.__name__!r}: it is not a plain function",
                hint="decorate its methods, or use `with perfuse.config.patch(...)` inside it",
            )
        if inspect.iscoroutinefunction(function):
            return self._around_coroutine(function)

        @functools.wraps(function)
        def patched(*args: P.args, **kwargs: P.kwargs) -> R:
            # A separate patch for each call: calls may run in several threads at once.
            with patch(self._overrides):
                return function(*args, **kwargs)

        return patched

    def _around_coroutine(self, function: Callable[P, Any]) -> Callable[P, Any]:
        @functools.wraps(function)
        async def patched(*args: P.args, **kwargs: P.kwargs) -> Any:
            with patch(self._overrides):
                return await function(*args, **kwargs)

        return patched


def describe() -> tuple[SettingRow, ...]:
    """Every setting with its type, its default and its description."""
    return tuple(
        SettingRow(
            name, kind_name(option.kind), option.default, option.sentence, option.part is not None
        )
        for name, option in _options().items()
    )


class _LiveGroup:
    """A proxy for one group of the live settings."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def __getattr__(self, leaf: str) -> Any:
        if leaf.startswith("__"):
            raise AttributeError(leaf)
        return snapshot().get(f"{self._name}.{leaf}")

    def __setattr__(self, leaf: str, value: Any) -> None:
        assign(f"{self._name}.{leaf}", value)

    def __dir__(self) -> list[str]:
        return [leaf.name for leaf in fields(getattr(snapshot(), self._name))]

    def __repr__(self) -> str:
        return repr(getattr(snapshot(), self._name))


class _LiveModule(ModuleType):
    """Turns assignments to the module's attributes into checked changes of the settings."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            assign(name, value)


def __getattr__(name: str) -> Any:
    if name in _groups():
        return _LiveGroup(name)
    if name.startswith("_"):
        raise AttributeError(name)
    return snapshot().get(name)


def __dir__() -> list[str]:
    return sorted([*globals(), *(leaf.name for leaf in fields(Settings))])


sys.modules[__name__].__class__ = _LiveModule
