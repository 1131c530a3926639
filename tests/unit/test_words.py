"""The prose of the code: docstrings open with a verb or a noun, and use the field's terms."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Words that a reader would have to look up, and the field's own.
INSTEAD = {
    r"dear(er|est)?": "expensive",
    r"anew": "again",
    r"astray": "misaligned",
    r"comput\w* (again|a second time)": "recompute",
    r"floats? of eight bits": "FP8",
    r"foretells?": "predicts",
    r"go(es|ing)? round": "persistent blocks",
    r"graphs? of inference": "inference graph",
    r"is no (plain )?(number|program|tensor|view)": "is not a ...",
    r"(kernel|loop|template)s? of ours": "generated kernel",
    r"kept memory": "persistent scratch",
    r"lent": "borrowed",
    r"(lies|lying)": "is stored, has the layout of",
    r"matrix products?": "matmul",
    r"past the caches?": "non-temporal store",
    r"price[sd]?": "cost",
    r"sooner": "faster",
    r"stretch(es)?": "checkpoint segment",
    r"tangled": "needs division or modulo",
}


@cache
def docstrings(path: Path) -> list[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return [ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds)]


def comments(path: Path) -> Iterator[str]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return (token.string for token in tokens if token.type == tokenize.COMMENT)


def sources() -> list[Path]:
    rooms = ("perfuse", "tests", "benchmarks", "tools", "examples")
    found = sorted(path for room in rooms for path in (ROOT / room).rglob("*.py"))
    return [path for path in found if path != Path(__file__)]


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    opening = r"(What|Those who|Whoever)\b"
    wrong = [(path.name, text) for path in having(rf'"""\s*{opening}') for text in docstrings(path)
             if re.match(opening, text)]  # fmt: skip
    assert wrong == []


def having(pattern: str) -> list[Path]:
    """The files with a text that matches; only these are worth parsing."""
    found = re.compile(pattern)
    return [path for path in sources() if found.search(path.read_text())]


def test_prose_uses_the_fields_terms() -> None:
    pages = {path: path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}
    words = having("|".join(rf"\b{word}\b" for word in INSTEAD).replace(" ", r"[\s#]+"))
    pages |= {path: "\n".join([*docstrings(path), *comments(path)]) for path in words}
    wrong = [
        f"{path.relative_to(ROOT)}: {found[0]!r}, say {better!r}"
        for path, text in pages.items()
        for word, better in INSTEAD.items()
        if (found := re.search(rf"\b{word}\b", text))
    ]
    assert wrong == []
