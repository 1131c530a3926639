"""`Writer`: the one way text is generated, so that all sources are indented consistently."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager


class Writer:
    """Lines with indentation; pieces can be written separately and joined later."""

    def __init__(self, indent: int = 0) -> None:
        self._lines: list[str] = []
        self._indent = indent

    def line(self, text: str) -> None:
        self._lines.append("  " * self._indent + text if text else "")

    @contextmanager
    def block(self, opening: str, closing: str = "}") -> Iterator[None]:
        self.line(opening)
        self._indent += 1
        yield
        self._indent -= 1
        self.line(closing)

    @contextmanager
    def indented(self, opening: str) -> Iterator[None]:
        """A block that ends with its indentation, as in Python."""
        self.line(opening)
        self._indent += 1
        yield
        self._indent -= 1

    @contextmanager
    def blocks(self, openings: Iterable[str]) -> Iterator[None]:
        """Blocks inside one another, outermost first."""
        with ExitStack() as stack:
            for opening in openings:
                stack.enter_context(self.block(opening))
            yield

    def child(self) -> Writer:
        """A piece that will be inserted at the current depth."""
        return Writer(self._indent)

    def take(self, piece: Writer) -> None:
        self._lines += piece._lines

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"
