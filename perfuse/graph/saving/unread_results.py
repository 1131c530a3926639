"""Results that eager does not save for its backward.

The caller may change a result in place before the backward runs. Eager refuses that backward only
where one of its formulas reads the result, as that of exp does. That of a quotient divides the
operands again; merged with the forward's division, it would read the result.
"""

from torch.fx import Graph, Node

from perfuse.graph.aliases import is_view
from perfuse.graph.facts import UNREAD_RESULT, reached, results_of
from perfuse.graph.saving.roles import is_tagged_backward


def mark_unread_results(joint: Graph) -> None:
    """Mark the results that no call of the traced backward reads, nor a view of their memory."""
    if not any(is_tagged_backward(node) for node in joint.nodes):
        return  # the trace does not say which calls are the backward's
    for result in results_of(joint):
        owner = _owner(result)
        shown = reached({owner}, lambda node: [n for n in node.users if is_view(n)])
        readers = (user for node in shown for user in node.users)
        if owner.op == "call_function" and not any(map(is_tagged_backward, readers)):
            owner.meta[UNREAD_RESULT] = True


def _owner(node: Node) -> Node:
    """The value whose memory a view shows."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node
