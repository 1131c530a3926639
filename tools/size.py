"""Print the size of the code in one line, so that growth is seen and asked about."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path


def functions(path: Path) -> Iterator[tuple[int, str]]:
    """Length in lines and name of every function in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1, node.name


def summary(root: Path) -> str:
    """The size line of the Python files under a folder."""
    files = sorted(root.rglob("*.py"))
    lengths = {path: len(path.read_text().splitlines()) for path in files}
    largest = max(files, key=lambda path: lengths[path])
    longest, name = max(found for path in files for found in functions(path))
    return (
        f"size: {sum(lengths.values()):,} lines in {len(files)} files; "
        f"largest {largest.relative_to(root)} {lengths[largest]}; longest function {name} {longest}"
    )


if __name__ == "__main__":
    print(summary(Path(sys.argv[1])))
