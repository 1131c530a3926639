"""The minimum cut of a network: which side of it each vertex is on.

Built edge by edge, solved once by SciPy's maximum flow.
"""

from dataclasses import dataclass, field

import numpy as np

# SciPy's capacities are 32 bits wide. Amounts are scaled so that no cut worth having reaches this.
_MOST = 1 << 29
_INFINITE = 1 << 30

INFINITE = float("inf")
SOURCE, SINK = 0, 1


@dataclass(slots=True)
class Network:
    """Vertices are numbers, edges have capacities: bytes, or INFINITE for what may not be cut."""

    num_vertices: int = 2
    _tails: list[int] = field(default_factory=list)
    _heads: list[int] = field(default_factory=list)
    _capacities: list[float] = field(default_factory=list)

    def vertex(self) -> int:
        self.num_vertices += 1
        return self.num_vertices - 1

    def edge(self, tail: int, head: int, capacity: float) -> None:
        """At most one edge leads from a vertex to another."""
        if capacity > 0:
            self._tails.append(tail)
            self._heads.append(head)
            self._capacities.append(capacity)

    def source_side(self, most: float) -> list[bool]:
        """By vertex: whether it is before the minimum cut. Some cut of at most `most` must exist.

        If several cuts are minimal, the one nearest to the source.
        """
        # Imported here: it takes a quarter of a second, and a process whose captures are all
        # found on disk never cuts anything.
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        wanted = np.asarray(self._capacities)
        scaled = np.where(wanted > most, _INFINITE, np.ceil(wanted * (_MOST / max(most, 1.0))))
        edges = (np.asarray(self._tails, np.int32), np.asarray(self._heads, np.int32))
        shape = (self.num_vertices, self.num_vertices)
        capacity = csr_array((scaled.astype(np.int32), edges), shape=shape)
        residual = capacity - maximum_flow(capacity, SOURCE, SINK).flow
        residual.eliminate_zeros()
        reached = breadth_first_order(residual, SOURCE, return_predecessors=False)
        side = np.zeros(self.num_vertices, bool)
        side[reached] = True
        found: list[bool] = side.tolist()
        return found
