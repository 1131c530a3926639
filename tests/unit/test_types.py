"""Kinds are types, not text that is compared; long calls name their arguments."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "perfuse"
TYPED = ("kind", "role")
MOST_ARGUMENTS = 7  # without a name
# Rows of numbers, in the order of the libraries that they are passed to.
BY_POSITION = ("codegen/ck", "codegen/triton/templates")


def is_typed(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in TYPED


def has_text(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Constant) and isinstance(n.value, str) for n in ast.walk(node))


def is_compared_with_text(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return any(map(is_typed, sides)) and any(map(has_text, sides))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        is_prefix = node.func.attr in ("startswith", "endswith", "get")
        given = [node.func.value, *node.args]
        return is_prefix and any(map(is_typed, given)) and any(map(has_text, given))
    if isinstance(node, ast.Subscript):
        return is_typed(node.slice) and isinstance(node.value, ast.Dict) and has_text(node.value)
    return isinstance(node, ast.Match) and is_typed(node.subject) and has_text(node)


def has_many_arguments(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and len(node.args) > MOST_ARGUMENTS


@cache
def code() -> list[tuple[str, ast.AST]]:
    files = {p.relative_to(PACKAGE): p.read_text() for p in sorted(PACKAGE.rglob("*.py"))}
    return [(str(p), node) for p, text in files.items() for node in ast.walk(ast.parse(text))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('loop.kind == "map"', True),
        ('loop.kind in ("any", "all")', True),
        ('"map" != m.loop.kind', True),
        ('member.role.startswith("in")', True),
        ('{"a": 1}[tile.kind]', True),
        ('{"a": 1}.get(tile.kind)', True),
        ("loop.kind is LoopKind.MAP", False),
        ("{LoopKind.MAP: 1}[loop.kind]", False),
        ('name == "map"', False),
    ],
)
def test_comparisons_are_found(text: str, expected: bool) -> None:
    found = any(is_compared_with_text(node) for node in ast.walk(ast.parse(text)))
    assert found == expected


def test_kinds_and_roles_are_types() -> None:
    found = [f"{name}:{ast.unparse(node)}" for name, node in code() if is_compared_with_text(node)]
    assert found == []


def test_long_calls_name_their_arguments() -> None:
    found = [
        f"{name}:{ast.unparse(node)}"
        for name, node in code()
        if has_many_arguments(node) and not name.startswith(BY_POSITION)
    ]
    assert found == []
