"""Post-order traversal with an explicit stack: programs nest deeper than Python may recurse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def post_order(
    root: T, children: Callable[[T], Iterable[T]], is_done: Callable[[T], bool]
) -> Iterator[T]:
    """Yield what `root` leads to, each after its children, and `root` last.

    The order is that of a recursive function. `is_done` is asked again at every step: the caller
    marks what it has received, which is then neither entered nor yielded again.
    """
    stack = [(root, iter(children(root)))]
    while stack:
        node, remaining = stack[-1]
        for child in remaining:
            if not is_done(child):
                stack.append((child, iter(children(child))))
                break
        else:
            stack.pop()
            yield node
