"""The size of the code in one line, and limits that fail the check: long files, long functions."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE, MAX_FUNCTION = 600, 45  # lines


def functions(path: Path) -> Iterator[tuple[int, str]]:
    """Length in lines and name of every function in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1, node.name


def summary(root: Path) -> str:
    """The size line of the Python files under a folder."""
    files = sorted(root.rglob("*.py"))
    lengths = {path: num_lines(path) for path in files}
    largest = max(files, key=lambda path: lengths[path])
    longest, name = max(found for path in files for found in functions(path))
    return (
        f"size: {sum(lengths.values()):,} lines in {len(files)} files; "
        f"largest {largest.relative_to(root)} {lengths[largest]}; longest function {name} {longest}"
    )


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def too_long(root: Path) -> Iterator[str]:
    """Files and functions beyond the limits."""
    for path in sorted(root.rglob("*.py")):
        if num_lines(path) > MAX_FILE:
            yield f"{path}: {num_lines(path)} lines, at most {MAX_FILE}"
        for length, name in functions(path):
            if length > MAX_FUNCTION:
                yield f"{path}: {name} has {length} lines, at most {MAX_FUNCTION}"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    print(summary(folder))
    for found in (mistakes := list(too_long(folder))):
        print(found)
    sys.exit(bool(mistakes))
