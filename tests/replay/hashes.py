"""The kept hashes: a line for each program and target, so that a change reads well in a review."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

KEPT = Path(__file__).parent / "hashes.txt"
# Of a program, by "target/graph.part".
Hashes = dict[str, str]


@dataclass(frozen=True, slots=True)
class Record:
    """Hashes of generated texts, and the packages that made the graphs."""

    packages: dict[str, str]
    programs: dict[str, Hashes]


def installed() -> dict[str, str]:
    """The packages that decide what a graph looks like before we see it."""
    return {name: installed_version(name) for name in ("torch", "transformers")}


def installed_version(name: str) -> str:
    try:
        return version(name).split("+")[0]
    except PackageNotFoundError:
        return "none"


def comparable(name: str, kept: Record) -> bool:
    """Whether a program's graphs come from the versions that the kept hashes were made with."""
    needed = ("torch", "transformers") if name.startswith("model/") else ("torch",)
    here = installed()
    return all(kept.packages.get(package) == here[package] for package in needed)


def read(path: Path = KEPT) -> Record:
    packages: dict[str, str] = {}
    programs: dict[str, Hashes] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        words = line.split()
        if words[0] == "#":
            packages[words[1]] = words[2]
            continue
        name, target, *rest = words
        found = programs.setdefault(name, {})
        for word in rest:
            part, _, digest = word.partition("=")
            found[f"{target}/{part}"] = digest
    return Record(packages, programs)


def write(record: Record, path: Path = KEPT) -> None:
    lines = [f"# {name} {version}" for name, version in record.packages.items()]
    for name, hashes in sorted(record.programs.items()):
        targets = sorted({part.partition("/")[0] for part in hashes})
        for target in targets:
            own = {k.partition("/")[2]: v for k, v in hashes.items() if k.startswith(f"{target}/")}
            lines.append(" ".join([name, target, *(f"{k}={v}" for k, v in sorted(own.items()))]))
    path.write_text("\n".join(lines) + "\n")


def changed_parts(before: Hashes, after: Hashes) -> list[str]:
    return sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
