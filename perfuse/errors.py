"""User-facing errors: each states what went wrong, where, and what to do about it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import ClassVar

# Exceptions that reading a damaged document may raise: JSON, text, missing rows, wrong sizes.
MALFORMED = (
    *(ArithmeticError, AttributeError, LookupError, RuntimeError, SyntaxError),
    *(TypeError, ValueError),
)


class PerfuseError(Exception):
    """The root of every error that Perfuse raises on purpose."""

    default_hint: ClassVar[str | None] = None

    def __init__(self, message: str, *, at: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.at = at
        self.hint = hint if hint is not None else self.default_hint

    def __str__(self) -> str:
        lines = [self.message]
        if self.at is not None:
            lines.append(f"  at: {self.at}")
        if self.hint is not None:
            lines.append(f"  what to do: {self.hint}")
        return "\n".join(lines)


class ConfigError(PerfuseError):
    """A setting was given an invalid value."""


class UnsupportedPython(PerfuseError):
    """This version of Python cannot run compiled functions correctly."""


class RefusedOp(PerfuseError, RuntimeError):
    """An operation was called in an autocast region whose policy refuses it."""

    default_hint = (
        "call it with autocast disabled, use an equivalent that is safe in a lower precision, or "
        "give it another rule in the region's policy."
    )

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is refused by the policy of the autocast region around it")


class Fp8Unavailable(PerfuseError, RuntimeError):
    """An FP8 recipe was requested on a device that cannot run it."""

    default_hint = (
        "NVIDIA GPUs of compute capability 8.9 or more (Ada, Hopper, Blackwell) run FP8 recipes; "
        "device type 'cpu' emulates them. Use bfloat16 elsewhere: precision='bf16'."
    )


class Fp8StateWarning(UserWarning):
    """A checkpoint and the model that loads it differ in their state of delayed FP8 scaling."""


class UnknownOption(ConfigError, AttributeError):
    """An unknown setting or mode was named.

    Also an AttributeError, so that `hasattr(perfuse.config, name)` returns False.
    """

    default_hint = "perfuse.config.describe() lists every setting."

    def __init__(
        self, name: str, known: Iterable[str], *, at: str | None = None, what: str = "setting"
    ) -> None:
        choices = list(known)
        nearest = get_close_matches(name, choices, n=1, cutoff=0.5)
        rest = self.default_hint if what == "setting" else f"choose one of: {', '.join(choices)}."
        hint = f"did you mean {nearest[0]!r}? {rest}" if nearest else rest
        super().__init__(f"unknown {what} {name!r}", at=at, hint=hint)
        self.name = name
        self.nearest = nearest[0] if nearest else None


class MemoryFault(PerfuseError):
    """A kernel or a library call wrote out of bounds (detected by `verify="memory"`)."""

    default_hint = "this is a bug in Perfuse; please report it with the function and its inputs."
    is_wrong_result = True  # of a candidate that a tuner tries

    def __init__(self, step: str, place: str) -> None:
        super().__init__(f"{step} wrote out of bounds, {place}")


class ForkedGpuCall(PerfuseError):
    """A function compiled for a GPU was called in a process forked after the GPU was in use."""

    default_hint = (
        'start the process another way: multiprocessing.get_context("spawn"), or '
        'DataLoader(..., multiprocessing_context="spawn").'
    )

    def __init__(self) -> None:
        super().__init__("functions compiled for a GPU cannot run in a forked process")


class ConfigWarning(UserWarning):
    """An unknown variable or log channel was configured and is ignored."""


class VersionWarning(UserWarning):
    """A version of PyTorch that this version of Perfuse is not tested with."""


class CompilerMissing(PerfuseError):
    """No C++ compiler could be found on this machine."""

    default_hint = (
        "install one (Debian and Ubuntu: apt-get install g++, Fedora: dnf install gcc-c++), "
        "or point $CXX or the setting cpu.compiler at one."
    )


class CompilerFailed(PerfuseError):
    """The C++ compiler rejected a source that Perfuse generated."""

    default_hint = (
        "run the command above on the saved source to reproduce it, and please report it with "
        "that source."
    )

    def __init__(self, command: Sequence[str], output: str, source: Path | None = None) -> None:
        text = f"the C++ compiler failed\n  command: {shlex.join(command)}\n{output.rstrip()}"
        super().__init__(text, at=None if source is None else str(source))
        self.command = tuple(command)
        self.output = output
        self.source = source


class CkUnavailable(PerfuseError):
    """Composable Kernel, or the compiler that it needs, is missing or incomplete."""

    default_hint = "set rocm.ck_dir to the folder of Composable Kernel, rocm.compiler to hipcc."


class CkWarning(UserWarning):
    """Composable Kernel was selected and cannot be used, or some instance does not compile."""


class CannotBuild(PerfuseError):
    """No folder on this machine can hold the files of a compile."""

    default_hint = "free some disk space, or set TMPDIR to a writable folder."


class KernelTooLarge(PerfuseError):
    """A kernel that a GPU cannot launch: a block exceeds a limit of the hardware."""

    default_hint = "please report the program: Perfuse should have chosen a smaller tile."

    def __init__(self, message: str, kernels: Sequence[str]) -> None:
        super().__init__(message)
        self.kernels = tuple(kernels)  # names of their functions


class NoValidChoicesError(PerfuseError):
    """No candidate for an operation ran and gave the right result."""

    default_hint = "set autotune_fallback_to_aten=True, or add ATEN to max_autotune_gemm_backends."

    def __init__(self, subject: str, reasons: Mapping[str, str]) -> None:
        rows = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
        # The name is in the text: PyTorch shows the text of a backend's error.
        super().__init__(f"NoValidChoicesError: no valid candidate for {subject}{rows}")
        self.reasons = dict(reasons)


class UnsupportedOp(PerfuseError):
    """An operation that Perfuse can neither compile nor run through ATen."""

    default_hint = "set on_error='eager' to run the graph eagerly, or register a lowering."


class UnsupportedCast(UnsupportedOp):
    """A conversion between dtypes that Perfuse compiles only on request."""

    default_hint = "set fp8_cross_cast=True to convert through float32, as eager PyTorch does."


class CompileFailed(PerfuseError):
    """A stage of the compiler failed on a graph: a bug in Perfuse."""

    default_hint = "set on_error='eager' to run this graph eagerly; please report the program."


class OverBudget(PerfuseError):
    """A training step exceeds its memory budget, whatever is recomputed."""

    default_hint = (
        "raise memory_budget, reduce the batch size, or set over_budget='warn' to run with the "
        "lowest peak."
    )

    def __init__(self, message: str, *, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes  # the lowest peak that can be reached


class BudgetWarning(UserWarning):
    """A memory budget cannot be met; the plan with the lowest peak is used."""


class CacheDamaged(PerfuseError):
    """A cache entry does not match its manifest."""

    default_hint = "no action needed: the entry is removed and rebuilt."


class CacheUnsafe(PerfuseError):
    """A folder or file of the cache that another user could have written."""

    default_hint = "set cache.dir (PERFUSE_CACHE_DIR) to a folder that only you can write to."

    def __init__(self, message: str, *, at: str | None = None, is_own: bool = True) -> None:
        super().__init__(message, at=at)
        self.is_own = is_own  # owned by this user, though others may write to it


class LibraryDamaged(PerfuseError):
    """A built library that is incomplete or cannot be loaded."""

    default_hint = "run `perfuse doctor` to test the compiler; set TMPDIR to build elsewhere."


class ArtefactError(PerfuseError):
    """A saved artefact cannot be loaded here: wrong file, wrong version or wrong machine."""

    default_hint = "recompile it on this machine with this version of Perfuse."


class LockFileError(PerfuseError):
    """A lock file of pinned choices that is damaged, unreadable or of another schema."""

    default_hint = "write it again (perfuse lock write), or unset lock_file (PERFUSE_LOCK_FILE)."


class LockFileWarning(UserWarning):
    """A lock file that does not match this machine: its choices are not used."""


class RemoteCacheWarning(UserWarning):
    """A remote cache that cannot be used, or holds something unusable; compiling continues."""


class SpecError(PerfuseError):
    """An artefact violates the invariants of its stage: a bug in Perfuse."""

    default_hint = "this is a bug in Perfuse; please report the program that triggers it."
