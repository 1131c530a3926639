"""Errors that carry the node being processed, so that a message can name the op and its line."""

from torch.fx import Node

_ATTRIBUTE = "perfuse_node"


class working_on:  # noqa: N801 - reads as a function: `with working_on(node):`
    """A context for one node: an error that leaves it carries the innermost node."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and node_of(error) is None:
            setattr(error, _ATTRIBUTE, self._node)


def node_of(error: BaseException) -> Node | None:
    """The node that was being processed when this error was raised, if known."""
    return getattr(error, _ATTRIBUTE, None)
