"""The part of a generated module that one kernel depends on: its text and its callees'."""

from __future__ import annotations

import ast
from functools import lru_cache


@lru_cache(maxsize=64)
def _pieces(text: str) -> tuple[dict[str, str], str]:
    """The module's functions and values by name, and what stands around them (imports)."""
    named: dict[str, str] = {}
    around = []
    lines = text.splitlines()
    for node in ast.parse(text).body:
        names = _names_of(node)
        # Decorators stand above the line of the function itself.
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        piece = "\n".join(lines[first - 1 : node.end_lineno])
        named |= dict.fromkeys(names, piece)
        if not names:
            around.append(piece)
    return named, "\n".join(around)


def _names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


@lru_cache(maxsize=4096)
def _used(piece: str) -> frozenset[str]:
    return frozenset(n.id for n in ast.walk(ast.parse(piece)) if isinstance(n, ast.Name))


def text_of_kernel(text: str, name: str) -> str:
    """The part of the module that decides what this kernel compiles to."""
    named, around = _pieces(text)
    needed: dict[str, None] = {}
    waiting = [name]
    while waiting:
        at = waiting.pop()
        if at in named and at not in needed:
            needed[at] = None
            waiting += sorted(_used(named[at]))
    return "\n".join([around, *(named[n] for n in named if n in needed)])
