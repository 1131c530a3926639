"""Results that eager does not save for its backward.

The caller may change a result in place before the backward runs. Eager refuses that backward only
where one of its formulas reads the result, as that of exp does. That of a quotient divides the
operands again; merged with the forward's division, it would read the result.
"""

from torch.fx import Graph, Node

from perfuse.graph.aliases import is_view
from perfuse.graph.facts import NUM_RESULTS, UNREAD_RESULTS, output_leaves, output_node, reached
from perfuse.graph.saving.roles import is_tagged_backward


def mark_unread_results(joint: Graph) -> None:
    """Note the places of the results whose memory no call of the traced backward reads.

    Places, not values: those that passes merge with a result are in its memory from then on.
    """
    if not any(is_tagged_backward(node) for node in joint.nodes):
        return  # the trace does not say which calls are the backward's
    end = output_node(joint)
    results = enumerate(output_leaves(joint)[: end.meta[NUM_RESULTS]])
    end.meta[UNREAD_RESULTS] = tuple(
        place for place, result in results if isinstance(result, Node) and _is_unread(result)
    )


def _is_unread(result: Node) -> bool:
    readers = (user for node in _views_of(_owner(result)) for user in node.users)
    return not any(map(is_tagged_backward, readers))


def in_unread_results(joint: Graph) -> dict[Node, Node]:
    """The values in the memory of the results that were noted, and what computes each."""
    results, places = output_leaves(joint), output_node(joint).meta.get(UNREAD_RESULTS, ())
    owners = {_owner(results[place]) for place in places}
    return {node: o for o in owners if o.op == "call_function" for node in _views_of(o)}


def _owner(node: Node) -> Node:
    """The value whose memory a view shows."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _views_of(owner: Node) -> set[Node]:
    return reached({owner}, lambda node: [n for n in node.users if is_view(n)])
