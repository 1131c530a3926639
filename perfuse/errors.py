"""The errors a user can meet: each says what went wrong, where, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import ClassVar

# Whatever reading a damaged document may trip over: JSON, text, a missing row, sizes that lie.
MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
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
    """A setting was given a value it cannot take."""


class UnsupportedPython(PerfuseError):
    """This version of Python cannot run compiled functions correctly."""


class UnknownOption(ConfigError, AttributeError):
    """A setting or a mode was named that does not exist.

    Also an AttributeError, so that `hasattr(perfuse.config, name)` answers instead of raising.
    """

    default_hint = "perfuse.config.describe() lists every setting."

    def __init__(
        self, name: str, known: Iterable[str], *, at: str | None = None, what: str = "setting"
    ) -> None:
        choices = list(known)
        nearest = get_close_matches(name, choices, n=1, cutoff=0.5)
        rest = self.default_hint if what == "setting" else f"known are: {', '.join(choices)}."
        hint = f"did you mean {nearest[0]!r}? {rest}" if nearest else rest
        super().__init__(f"unknown {what} {name!r}", at=at, hint=hint)
        self.name = name
        self.nearest = nearest[0] if nearest else None


class ForkedGpuCall(PerfuseError):
    """A function compiled for a GPU was called in a process forked after the GPU was in use."""

    default_hint = (
        'start the process another way: multiprocessing.get_context("spawn"), or '
        'DataLoader(..., multiprocessing_context="spawn").'
    )

    def __init__(self) -> None:
        super().__init__("a GPU cannot be used in a forked process")


class ConfigWarning(UserWarning):
    """Something was configured that Perfuse does not know, and is ignored."""


class VersionWarning(UserWarning):
    """A version of PyTorch that this version of Perfuse is not tested with."""


class CompilerMissing(PerfuseError):
    """No C++ compiler could be found on this machine."""

    default_hint = (
        "install one (Debian and Ubuntu: apt-get install g++, Fedora: dnf install gcc-c++), "
        "or name one by $CXX or the setting cpu.compiler."
    )


class CompilerFailed(PerfuseError):
    """The C++ compiler refused a source that Perfuse generated."""

    default_hint = "run the command above on the kept source; please report it with that source."

    def __init__(self, command: Sequence[str], output: str, source: Path | None = None) -> None:
        text = f"the C++ compiler failed\n  command: {' '.join(command)}\n{output.rstrip()}"
        super().__init__(text, at=None if source is None else str(source))
        self.command = tuple(command)
        self.output = output
        self.source = source


class CannotBuild(PerfuseError):
    """No folder on this machine takes the files of a compile."""

    default_hint = "free some space, or set TMPDIR to a folder that can be written."


class KernelTooLarge(PerfuseError):
    """Kernels that a GPU cannot launch: a block asks for more than there is of something."""

    default_hint = "a smaller tile; please report the program, since Perfuse should have chosen it."

    def __init__(self, message: str, kernels: Sequence[str]) -> None:
        super().__init__(message)
        self.kernels = tuple(kernels)  # their functions' names


class UnsupportedOp(PerfuseError):
    """An operation that Perfuse can neither compile nor hand to ATen."""

    default_hint = "set on_error='eager' to run the graph eagerly, or register a lowering."


class CompileFailed(PerfuseError):
    """A stage of the compiler failed on a graph: a mistake of Perfuse's own."""

    default_hint = "set on_error='eager' to run this graph eagerly; please report the program."


class OverBudget(PerfuseError):
    """A training step takes more memory than its budget, whatever is recomputed."""

    default_hint = (
        "raise memory_budget, make the batch smaller, or set over_budget='warn' to take the least."
    )

    def __init__(self, message: str, *, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes  # how low it can go


class BudgetWarning(UserWarning):
    """A memory budget cannot be kept; the least there is was taken."""


class CacheDamaged(PerfuseError):
    """A cache entry does not hold what its manifest says."""

    default_hint = "no action needed: the entry is removed and rebuilt."


class CacheUnsafe(PerfuseError):
    """A folder or file of the cache that another user could have written."""

    default_hint = "set cache.dir (PERFUSE_CACHE_DIR) to a folder that only you can write."

    def __init__(self, message: str, *, at: str | None = None, is_own: bool = True) -> None:
        super().__init__(message, at=at)
        self.is_own = is_own  # this user's, if others can write to it


class LibraryDamaged(PerfuseError):
    """A built library that is not whole, or cannot be loaded."""

    default_hint = "perfuse doctor tries the compiler; setting TMPDIR changes where it works."


class ArtefactError(PerfuseError):
    """A saved artefact cannot be loaded here: wrong file, wrong version or wrong machine."""

    default_hint = "compile it again on this machine with this version of Perfuse."


class SpecError(PerfuseError):
    """An artefact breaks the rules of its stage: a mistake of Perfuse's own."""

    default_hint = "this is a bug in Perfuse; please report the program that shows it."
