"""The glossary: sorted, in use, and complete for the terms of the architecture page."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@cache
def glossary() -> dict[str, str]:
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    return dict(rows[1:])  # without the heading


@cache
def text_in_use() -> str:
    """Documentation and code, as a reader who looks for a term would search them."""
    pages = [*DOCS.glob("*.md"), *ROOT.glob("*.md"), *(ROOT / "perfuse").rglob("*.py")]
    texts = (page.read_text() for page in pages if page.name != "glossary.md")
    return re.sub(r"[\s_]+", " ", "\n".join(texts)).lower()


def introduced_terms() -> set[str]:
    """Terms in italics: on the architecture page and in what each room says of itself."""
    pages = [DOCS / "architecture.md", *(ROOT / "perfuse").rglob("__init__.py")]
    found = (
        re.findall(r"(?<![*\w])\*([a-z][a-z -]+)\*(?![*\w])", page.read_text()) for page in pages
    )
    return {term for terms in found for term in terms}


def is_listed(term: str) -> bool:
    forms = {term, term.removesuffix("s"), term.removesuffix("es")}
    return bool(forms & glossary().keys()) or any(
        f"*{term}*" in text for text in glossary().values()
    )


def test_terms_are_sorted_and_unique() -> None:
    listed = re.findall(r"^\| (.+?) \| ", (DOCS / "glossary.md").read_text(), re.MULTILINE)[1:]
    assert listed == sorted(set(listed), key=str.lower)


def test_every_term_is_used() -> None:
    unused = [t for t in glossary() if not re.search(rf"\b{re.escape(t.lower())}", text_in_use())]
    assert unused == []


def test_introduced_terms_are_listed() -> None:
    terms = introduced_terms()
    assert len(terms) >= 10
    assert [term for term in sorted(terms) if not is_listed(term)] == []


def test_files_named_exist() -> None:
    for text in glossary().values():
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", text):
            assert (ROOT / name).exists() or (ROOT / "perfuse" / name).exists(), name
